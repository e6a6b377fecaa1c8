"""Object collectives: torch.distributed computes the objects' sizes and joins them on the device, by kernels.

Kernels compute nothing here, so a few functions are replaced for that module only: joined data is copied
(src/kept.c), and sizes are added and compared on the host.
"""

from __future__ import annotations

import builtins
import ctypes
import types
from typing import Any

# ruff: noqa: INP001 -- a directory on PYTHONPATH, not a package

LARGEST = 64 << 10  # bytes that src/exchange.c sends between processes


def compute_sizes_on_the_host(module: Any, library: Any) -> None:
    """Replace `torch.cat`, `torch.sum`, `max` and `enumerate` in torch.distributed.distributed_c10d."""
    torch = module.torch
    copy = library.null_copy
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def cat(tensors: Any, *rest: Any, **named: Any) -> Any:
        whole = torch.cat(tensors, *rest, **named)
        if whole.is_cuda and whole.dim() == 1 and whole.nbytes <= LARGEST:
            place = whole.data_ptr()
            for tensor in tensors:
                copy(place, tensor.data_ptr(), tensor.nbytes)
                place += tensor.nbytes
        return whole

    def on_host(value: Any) -> Any:
        return value.cpu() if isinstance(value, torch.Tensor) and value.nbytes <= LARGEST else value

    def largest(*values: Any, **named: Any) -> Any:
        if len(values) == 1 and isinstance(values[0], (list, tuple)):
            values = ([on_host(value) for value in values[0]],)
        return builtins.max(*values, **named)

    class Torch(types.ModuleType):
        """torch with two replaced functions."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    module.torch = Torch("torch")
    module.torch.cat = cat
    module.torch.sum = lambda tensor, *rest, **named: torch.sum(on_host(tensor), *rest, **named)
    module.max = largest
    module.enumerate = lambda values, *rest: builtins.enumerate(on_host(values), *rest)
