"""Fast start-up, for a program that runs once per query."""

from __future__ import annotations

import gc
import sys
from types import ModuleType


def start_quickly() -> None:
    """Called before anything heavy is imported."""
    # Nothing that start-up makes is garbage; looking for some would cost a tenth of an estimate's time.
    gc.set_threshold(200_000, 50, 1000)
    _skip_plugin_search()


def end_quickly() -> None:
    """Skip the interpreter's final garbage collection. Called last."""
    gc.freeze()


def _skip_plugin_search() -> None:
    """Pydantic without its search for plugins.

    The search reads the metadata of every installed package, and loads the mail parser to do so: another tenth.
    PYDANTIC_DISABLE_PLUGINS skips the reading but not the loading. A Pydantic that asks its loader for anything but
    plugins gets the real one.
    """
    name = "pydantic.plugin._loader"
    if name in sys.modules:
        return

    class _NoPlugins(ModuleType):
        def __getattr__(self, attribute: str) -> object:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            from importlib import import_module

            del sys.modules[name]
            return getattr(import_module(name), attribute)

    module = _NoPlugins(name)
    module.get_plugins = tuple  # type: ignore[attr-defined]  # called without arguments: no plugins
    sys.modules[name] = module
