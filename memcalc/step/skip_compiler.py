"""Skips imports of PyTorch that a process of memcalc does not need; they take a third of its time.

torch._dynamo, the compiler, is imported by the first optimizer step and by transformers' masks, for decorators that
affect a function only when it is compiled. It takes 1.7 s.
torch._meta_registrations, the shape functions of operators on tensors without values, is imported with torch. It takes
0.8 s, and a run on device tensors never calls it.
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
    """Stand-in for torch._dynamo until something other than a decorator is requested."""

    def __getattr__(self, name: str) -> Any:
        """Return a decorator that does nothing, a submodule, or the real module's attribute."""
        if name in DECORATORS:
            return unchanged
        if name == "trace_rules":
            return RULES
        if name.startswith("__"):  # inspect requests these of every module
            raise AttributeError(name)
        if importlib.util.find_spec(f"{NAME}.{name}") is not None:
            with suppress(ImportError):  # some import cycles work only in the real package's import order
                return importlib.import_module(f"{NAME}.{name}")
        return getattr(_real(), name)


class TraceRulesStub:
    """Stand-in for torch._dynamo.trace_rules: starting a process group empties its caches."""

    def __getattr__(self, name: str) -> Any:
        """Return a function that does nothing for the cache, else the real module's attribute."""
        return _nothing if name == "clear_lru_cache" else getattr(_real().trace_rules, name)


RULES = TraceRulesStub()


def _nothing() -> None:
    pass


def _real() -> Any:
    """Import and return the real compiler."""
    if isinstance(sys.modules.get(NAME), Stub):
        importlib.import_module("torch._prims")  # as meta kernels do: this import cycle works in one direction only
        del sys.modules[NAME]
    return importlib.import_module(NAME)


def unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Return the function itself, or a decorator that does so."""
    return unchanged if function is None else function


def without_compiler() -> None:
    """Put the stub in torch._dynamo's place, unless it is loaded; for processes that memcalc owns.

    Functions decorated meanwhile are not marked for a compiler that is imported later.
    """
    if NAME in sys.modules or importlib.util.find_spec("torch") is None:
        return
    import torch

    stub = Stub(NAME)
    stub.__path__ = [f"{torch.__path__[0]}/_dynamo"]  # its submodules can still be imported individually
    stub.__spec__ = importlib.machinery.ModuleSpec(NAME, None, is_package=True)
    sys.modules[NAME] = stub
    torch._dynamo = stub  # noqa: SLF001 -- where torch's own code looks it up


def without_meta_kernels() -> None:
    """Skip the kernels for fake tensors and the meta device; call it before torch is imported.

    If such a tensor is used nevertheless, most operators raise NotImplementedError: they have no kernel.
    """
    if "torch" not in sys.modules:
        sys.modules[META_KERNELS] = types.ModuleType(META_KERNELS)
