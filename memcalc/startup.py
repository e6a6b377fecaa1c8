"""Fast start-up and exit, for a program that runs once per query."""

from __future__ import annotations

import gc
import sys
from types import ModuleType


def start_quickly() -> None:
    """Speed up the imports that follow; call it before any heavy import."""
    # Start-up produces no garbage, so collections would waste a tenth of an estimate's time.
    gc.set_threshold(200_000, 50, 1000)
    _skip_plugin_search()


def end_quickly() -> None:
    """Skip the interpreter's final garbage collection; call it last."""
    gc.freeze()


def _skip_plugin_search() -> None:
    """Replace Pydantic's plugin loader by one that finds no plugins.

    The real loader reads the metadata of every installed package, and imports the email parser to do so: another tenth
    of an estimate's time. PYDANTIC_DISABLE_PLUGINS skips the reading but not the import. If Pydantic uses any other
    attribute of the loader, the real module is imported.
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
