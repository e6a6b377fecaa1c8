"""Leaves PyTorch's compiler unloaded in a program that compiles nothing: 1.7 s of every run.

The first optimizer step imports torch._dynamo in two places, only to tell a compiler where not to look. As long as
nobody else has imported it, nobody compiles, and there is nothing to tell. From its import on all is as in torch.
"""

from __future__ import annotations

import functools
from typing import Any

# ruff: noqa: INP001 -- a folder for PYTHONPATH, no package

loaded = False  # a plain global: what the compiler itself reads here must be easy for it


def begin(*_: Any) -> None:
    """The compiler is about to be imported."""
    global loaded  # noqa: PLW0603 -- one compiler a process
    loaded = True


def spare_disabled(module: Any) -> None:
    """torch._compile has been imported, whose decorator marks functions that the compiler must not look into."""
    original = getattr(module, "_disable_dynamo", None)
    if original is None:
        return  # a torch that does it in another way does it by itself

    def _disable_dynamo(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        if function is None:
            return functools.partial(_disable_dynamo, *args, **kwargs)
        disabled = original(function, *args, **kwargs)

        @functools.wraps(function)
        def inner(*given: Any, **named: Any) -> Any:
            return disabled(*given, **named) if loaded else function(*given, **named)

        return inner

    module._disable_dynamo = _disable_dynamo  # noqa: SLF001 -- torch's own name for it, for its own use


def spare_steps(module: Any) -> None:
    """torch.optim.optimizer has been imported, whose decorator of steps breaks the compiler's graph around them."""
    original = getattr(module, "_use_grad_for_differentiable", None)
    if original is None:
        return  # likewise
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

    module._use_grad_for_differentiable = _use_grad_for_differentiable  # noqa: SLF001 -- likewise
