"""A name in a user's Python file, `model.py:make_model`; only `memcalc trace` accepts one."""

from __future__ import annotations

import re
from pathlib import Path

from memcalc.errors import InputError
from memcalc.files import is_file

_TARGET = re.compile(r"(.+\.py)(?::([^:/\\]*))?", re.DOTALL)
NAME_REMEDY = "Write FILE.py:NAME, where NAME is a function without arguments, a class or a module."


def is_python_target(source: object) -> bool:
    """Return whether a source names a Python file, with or without a name in it."""
    return isinstance(source, str) and _TARGET.fullmatch(source) is not None


def split_target(target: str) -> tuple[Path, str]:
    """Return the file and the name in it.

    Raises:
        InputError: the text is not of this form, or the file does not exist.
    """
    match = _TARGET.fullmatch(target)
    if match is None or not (match[2] or "").isidentifier():
        raise InputError(f"{target!r} does not name a function in a Python file.", NAME_REMEDY, target)
    file = Path(match[1])
    if not is_file(file):
        raise InputError("the file does not exist.", NAME_REMEDY, str(file))
    return file, match[2]
