"""First on PYTHONPATH, so that every Python that a dry run starts executes this file first.

It may be any Python from 3.9 on, without memcalc installed: nothing in this directory imports memcalc. The
environment's own sitecustomize, which this one hides, is run too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

# ruff: noqa: INP001 -- a directory on PYTHONPATH, not a package

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100,PTH120 -- pathlib costs 5 ms per start


def run(name: str, places: list[str]) -> None:
    """Execute the module of that name from these directories, if there is one."""
    spec = importlib.machinery.PathFinder.find_spec(name, places)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        if name != "sitecustomize":
            sys.modules[name] = module
        spec.loader.exec_module(module)


# Another installation of memcalc may have put its own file here: a dry run may start a dry run.
run("sitecustomize", [e for e in sys.path if not os.path.exists(os.path.join(e, "memcalc_watch.py"))])  # noqa: PTH110,PTH118 -- as above
if "MEMCALC_NULL_DEVICE" in os.environ:
    run("memcalc_watch", [HERE])
