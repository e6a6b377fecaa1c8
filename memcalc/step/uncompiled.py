"""Keeps PyTorch from loading what a process of ours has no use for: a third of its time.

torch._dynamo, the compiler, is imported by the first optimizer step and by transformers' masks, for decorators that
change a function only when it is compiled. It takes 1.7 s.
torch._meta_registrations, the shapes that operators give to tensors without values, is imported with torch. It takes
0.8 s, and a run on tensors of a device never asks it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

NAME = "torch._dynamo"
META_KERNELS = "torch._meta_registrations"
DECORATORS = frozenset({"allow_in_graph", "assume_constant_result", "disable", "graph_break", "nonstrict_trace"})


class Stub(types.ModuleType):
    """torch._dynamo until something of it is asked for that is no decorator."""

    def __getattr__(self, name: str) -> Any:
        """A decorator that does nothing, one of its modules alone, or what the real one has."""
        if name in DECORATORS:
            return unchanged
        if name == "trace_rules":
            return RULES
        if name.startswith("__"):  # what inspect asks of every module
            raise AttributeError(name)
        if importlib.util.find_spec(f"{NAME}.{name}") is not None:
            with suppress(ImportError):  # some import each other in a circle that only the real one's order opens
                return importlib.import_module(f"{NAME}.{name}")
        return getattr(_real(), name)


class Rules:
    """torch._dynamo.trace_rules: a process group that begins empties its caches."""

    def __getattr__(self, name: str) -> Any:
        """Nothing to empty; else what the real one has."""
        return _nothing if name == "clear_lru_cache" else getattr(_real().trace_rules, name)


RULES = Rules()


def _nothing() -> None:
    pass


def _real() -> Any:
    """The compiler after all."""
    if isinstance(sys.modules.get(NAME), Stub):
        importlib.import_module("torch._prims")  # as meta kernels do: a circle that opens on this side alone
        del sys.modules[NAME]
    return importlib.import_module(NAME)


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


def without_meta_kernels() -> None:
    """Leave out what operators do to fake tensors and on the meta device; torch must not have been imported.

    Where such a tensor comes by nevertheless, most operators raise NotImplementedError: they have no kernel.
    """
    if "torch" not in sys.modules:
        sys.modules[META_KERNELS] = types.ModuleType(META_KERNELS)
