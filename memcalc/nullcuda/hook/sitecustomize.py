"""Found first on PYTHONPATH, so every Python that a watched command starts runs this before anything else.

It may be any Python from 3.9 on, without memcalc installed: nothing in this folder imports memcalc. A
sitecustomize of the environment's own, which this one hides, is run as well.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

# ruff: noqa: INP001 -- a folder for PYTHONPATH, no package

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100,PTH120 -- pathlib costs every start 5 ms


def run(name: str, places: list[str]) -> None:
    """Execute the module of that name from these folders, if there is one."""
    spec = importlib.machinery.PathFinder.find_spec(name, places)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        if name != "sitecustomize":
            sys.modules[name] = module
        spec.loader.exec_module(module)


# Another installation of memcalc may have put its own here, as when a watched command watches one in turn.
run("sitecustomize", [e for e in sys.path if not os.path.exists(os.path.join(e, "memcalc_watch.py"))])  # noqa: PTH110,PTH118 -- likewise
if "MEMCALC_NULL_DEVICE" in os.environ:
    run("memcalc_watch", [HERE])
