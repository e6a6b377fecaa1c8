"""The syntax of source files, each parsed once for all tests of a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """Return a module's syntax tree; tests read it and change nothing in it."""
    return ast.parse(path.read_text(encoding="utf-8"))
