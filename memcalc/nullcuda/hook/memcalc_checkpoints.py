"""Checkpoints that the program wrote: their tensors are zeros, which must not be mistaken for trained weights."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable  # noqa: UP035 -- for Python 3.9

# ruff: noqa: INP001 -- a directory on PYTHONPATH, not a package
# ruff: noqa: PTH202, PTH100 -- pathlib slows down start-up

SMALLEST = 1 << 16  # bytes; smaller files are schedulers, generator states, arguments

count = 0  # number of files with tensors
first = ""  # path of the first file


def watch(owner: Any, name: str, *, place: int, initialized: Callable[[], bool]) -> None:
    """Record the files that a function writes.

    Args:
        owner: its module.
        name: torch.save, safetensors.torch.save_file.
        place: position of the path, or the open file, among its arguments.
        initialized: returns whether this process uses the GPU.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def save(*given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        target = given[place] if len(given) > place else named.get("f", named.get("filename"))
        if initialized():
            note(getattr(target, "name", target))
        return result

    setattr(owner, name, save)


def note(path: Any) -> None:
    """Record that a file was written."""
    global count, first  # noqa: PLW0603 -- one counter per process
    try:
        if not isinstance(path, (str, os.PathLike)) or os.path.getsize(path) < SMALLEST:
            return
    except OSError:  # moved already
        return
    first = first or os.path.abspath(path)
    count += 1
