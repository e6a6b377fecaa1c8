"""Skips PyTorch's compiler in programs that compile nothing, which saves 1.7 s per run.

The first optimizer step imports torch._dynamo in two places, only to exclude code from compilation. Until other code
imports it, nothing is compiled, so there is nothing to exclude. After that import, everything is as in torch.
"""

from __future__ import annotations

import functools
from typing import Any

# ruff: noqa: INP001 -- a directory on PYTHONPATH, not a package

loaded = False  # a plain global, because the compiler itself traces code that reads it


def begin(*_: Any) -> None:
    """Record that the compiler is about to be imported."""
    global loaded  # noqa: PLW0603 -- one compiler per process
    loaded = True


def spare_disabled(module: Any) -> None:
    """Patch torch._compile after its import: its decorator marks functions that the compiler must not trace."""
    original = getattr(module, "_disable_dynamo", None)
    if original is None:
        return  # another version of torch, which does it differently

    def _disable_dynamo(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        if function is None:
            return functools.partial(_disable_dynamo, *args, **kwargs)
        disabled = original(function, *args, **kwargs)

        @functools.wraps(function)
        def inner(*given: Any, **named: Any) -> Any:
            return disabled(*given, **named) if loaded else function(*given, **named)

        return inner

    module._disable_dynamo = _disable_dynamo  # noqa: SLF001 -- torch's private name


def spare_steps(module: Any) -> None:
    """Patch torch.optim.optimizer after its import: its decorator breaks the compiler's graph around steps."""
    original = getattr(module, "_use_grad_for_differentiable", None)
    if original is None:
        return  # as above
    torch = module.torch

    def _use_grad_for_differentiable(function: Any) -> Any:
        breaking = original(function)

        @functools.wraps(function)
        def step(self: Any, *given: Any, **named: Any) -> Any:
            if loaded:
                return breaking(self, *given, **named)
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return function(self, *given, **named)

        return step

    module._use_grad_for_differentiable = _use_grad_for_differentiable  # noqa: SLF001 -- as above
