"""Which checkpoints the program wrote: their tensors hold zeros, and nobody should take them for trained weights."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable  # noqa: UP035 -- runs on Python 3.9 too

# ruff: noqa: INP001 -- a folder for PYTHONPATH, no package
# ruff: noqa: PTH202, PTH100 -- pathlib costs time

SMALLEST = 1 << 16  # bytes: less is a scheduler, a generator's state, arguments

count = 0  # files with tensors
first = ""  # the path of the first


def watch(owner: Any, name: str, *, place: int, initialized: Callable[[], bool]) -> None:
    """Note the files that a function writes.

    Args:
        owner: its module.
        name: torch.save, safetensors.torch.save_file.
        place: of the path, or the open file, among its arguments.
        initialized: whether this process uses the GPU.
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
    """A file has been written."""
    global count, first  # noqa: PLW0603 -- one count a process
    try:
        if not isinstance(path, (str, os.PathLike)) or os.path.getsize(path) < SMALLEST:
            return
    except OSError:  # moved already
        return
    first = first or os.path.abspath(path)
    count += 1
