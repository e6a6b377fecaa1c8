"""Keeps PyTorch from loading its compiler in a process that compiles nothing: a fifth of its time.

torch._dynamo is imported by the first optimizer step and by transformers' masks, for decorators that change a function
only when it is compiled. It takes 1.7 s.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

NAME = "torch._dynamo"
DECORATORS = frozenset({"allow_in_graph", "assume_constant_result", "disable", "graph_break", "nonstrict_trace"})


class Stub(types.ModuleType):
    """torch._dynamo until something of it is asked for that is no decorator."""

    def __getattr__(self, name: str) -> Any:
        """A decorator that does nothing, one of its modules alone, or what the real one has."""
        if name in DECORATORS:
            return unchanged
        if name.startswith("__"):  # what inspect asks of every module
            raise AttributeError(name)
        if importlib.util.find_spec(f"{NAME}.{name}") is not None:
            return importlib.import_module(f"{NAME}.{name}")
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)


def unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """The function itself, or a decorator that gives it."""
    return unchanged if function is None else function


def without_compiler() -> None:
    """Put the stub in torch._dynamo's place, unless it has been loaded. For processes that are memcalc's own.

    What is marked while it stands there is not marked for a compiler that somebody wants later.
    """
    if NAME in sys.modules or importlib.util.find_spec("torch") is None:
        return
    import torch

    stub = Stub(NAME)
    stub.__path__ = [f"{torch.__path__[0]}/_dynamo"]  # its modules can still be imported one by one
    stub.__spec__ = importlib.machinery.ModuleSpec(NAME, None, is_package=True)
    sys.modules[NAME] = stub
    torch._dynamo = stub  # noqa: SLF001 -- where torch's own code looks
