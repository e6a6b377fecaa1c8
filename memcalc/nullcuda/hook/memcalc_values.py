"""Values that the program reads from the device: which are known, and which lines read unknown ones.

src/values.cpp computes known values. Without a C++ compiler it is not built, and all values are unknown.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Optional

# ruff: noqa: INP001 -- a directory on PYTHONPATH, not a package
# ruff: noqa: PTH110, PTH118, UP045 -- pathlib costs time, and Python 3.9 has no X | None

peak = importlib.import_module("memcalc_peak")

FILE = "libmemcalcvalues.so"  # as in memcalc/nullcuda/build.py
MOST_LINES = 100  # of the program, each with its number of reads
KEYS = ("TESTING_ONLY_GenericWrapper", "CustomRNGKeyId")  # dispatch keys that src/values.cpp adds to its tensors
BY_TYPE = ("new", "new_tensor")  # tensor methods that use the highest key for the device: legacyExtractDispatchKey
MOST_FRAMES = 60  # above the read

library: Optional[Any] = None
lines: dict[str, int] = {}  # reads of unknown values, by line of the program
kept: list[Any] = []  # keeps callbacks of C alive


def begin(torch: Any, core: Any, folder: str, *, same_for_all: bool) -> None:
    """Initialize after torch has been imported.

    Args:
        torch: the module.
        core: libmemcalcnull.so.
        folder: directory of the device.
        same_for_all: unknown scores choose the same for every row.
    """
    global library  # noqa: PLW0603 -- one per process
    path = os.path.join(folder, FILE)
    if os.path.exists(path):
        found = ctypes.CDLL(path)
        found.values_choices.restype = ctypes.c_longlong
        if found.values_begin(int(same_for_all)):
            library = found
            pass_over_keys(torch)
            found.values_carry.argtypes = (ctypes.c_void_p, ctypes.c_int)
            for name in BY_TYPE:
                setattr(torch.Tensor, name, without_keys(getattr(torch.Tensor, name), found.values_carry))
    call = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(note)
    kept.append(call)
    core.null_on_unknown_read(call)


def pass_over_keys(torch: Any) -> None:
    """Let higher-order operators (vmap of an autograd.Function), which dispatch by the highest key, skip these keys."""
    operators = importlib.import_module("torch._ops")
    for name in KEYS:
        key = torch._C._dispatch_key_parse(name)  # noqa: SLF001 -- no public name
        operators._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)  # noqa: SLF001 -- for operators registered later
        for operator in operators._higher_order_ops.values():  # noqa: SLF001 -- as torch looks them up
            operator.fallthrough(key)


def without_keys(method: Callable[..., Any], carry: Callable[[int, int], int]) -> Callable[..., Any]:
    """Return a tensor method that sees its tensor without the keys of src/values.cpp."""

    @functools.wraps(method)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        address = tensor._cdata  # noqa: SLF001 -- no public name
        carried = carry(address, 0)
        try:
            return method(tensor, *args, **kwargs)
        finally:
            if carried:
                carry(address, 1)

    return call


def note(_: int) -> None:
    """Record the line that has read an unknown value."""
    frames: list[dict[str, Any]] = []
    frame = sys._getframe(1) if hasattr(sys, "_getframe") else None  # noqa: SLF001 -- traceback would read the source files
    while frame is not None and len(frames) < MOST_FRAMES:
        code = frame.f_code
        frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    where = peak.place_of(frames)
    if where in lines or len(lines) < MOST_LINES:
        lines[where] = lines.get(where, 0) + 1


def choices() -> int:
    """Return the number of index tensors that unknown scores chose."""
    return 0 if library is None else int(library.values_choices())
