"""Masks that the program reads: how many elements a mask selects, and whether all are set.

Kernels compute nothing, so every mask would read as empty: padding masks would take transformers' slow path, and a
loss over labeled positions would see none. Instead every mask is assumed to be full: `nonzero` and functions based on
it find every element, and `all` is true. That is an upper bound of what a mask can select.
"""

from __future__ import annotations

import ctypes
import warnings
from typing import Any

# ruff: noqa: INP001 -- a directory on PYTHONPATH, not a package

TRUE = ctypes.create_string_buffer(b"\1", 1)

kept: list[Any] = []  # registrations end with their object
count = 0  # masks assumed to be full


def take_masks_as_full(torch: Any, library: Any) -> None:
    """Replace the CUDA kernels of aten::nonzero and aten::all."""
    tell = library.null_tell
    tell.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def nonzero(mask: Any) -> Any:
        global count  # noqa: PLW0603 -- one counter for the process
        count += mask.numel() > 1
        # The layout of the real kernel: one index per row, stored by dimension.
        return torch.empty((mask.dim(), mask.numel()), dtype=torch.int64, device=mask.device).t()

    def all_true(mask: Any) -> Any:
        dtype = torch.uint8 if mask.dtype == torch.uint8 else torch.bool
        answer = torch.empty((), dtype=dtype, device=mask.device)
        tell(answer.data_ptr(), ctypes.addressof(TRUE), 1)
        return answer

    aten = torch.library.Library("aten", "IMPL", "CUDA")
    with warnings.catch_warnings():  # about the overridden kernel
        warnings.simplefilter("ignore")
        for name, function in (("nonzero", nonzero), ("all", all_true)):
            try:
                aten.impl(name, function, allow_override=True)
            except TypeError:  # torch before 2.9 lacks the argument
                aten.impl(name, function)
    kept.append(aten)
