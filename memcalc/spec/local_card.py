"""The GPU of this machine, as its NVIDIA driver reports it: `--gpu auto`. No torch, and no context on the GPU."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from typing import NamedTuple

from memcalc.errors import InputError, Unavailable
from memcalc.spec.cards import Card, find_card

_LIBRARIES = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")
_NAME_BYTES = 256  # as torch asks for (cudaDeviceProp.name)


class LocalGpu(NamedTuple):
    """The first GPU that CUDA_VISIBLE_DEVICES leaves.

    Args:
        name: as torch.cuda.get_device_name shows it.
        total_bytes: that frameworks can allocate from.
    """

    name: str
    total_bytes: int


def local_gpu() -> LocalGpu:
    """Ask the driver for the first GPU (CUDA driver API: cuDeviceGetName, cuDeviceTotalMem).

    Raises:
        Unavailable: there is no NVIDIA driver, or it shows no GPU.
    """
    for library in _LIBRARIES:
        try:
            driver = ctypes.CDLL(library)
            break
        except OSError:
            continue
    else:
        raise Unavailable("--gpu auto reads this machine's GPU, and no NVIDIA driver is installed. Name a GPU instead.")
    device, name, total = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetName(name, _NAME_BYTES, device)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    )
    if failed:
        raise Unavailable(
            f"--gpu auto reads this machine's GPU, and its NVIDIA driver shows none (CUDA error {failed}). "
            "Check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or name a GPU."
        )
    return LocalGpu(name.value.decode(errors="replace"), total.value)


def local_card() -> Card:
    """Return the GPU of this machine: a row of the table by its name, with the memory that its driver reports.

    A GPU that the table does not have is known by its memory alone.

    Raises:
        Unavailable: there is no NVIDIA driver, or it shows no GPU.
    """
    found = local_gpu()
    size = f"{found.total_bytes >> 20}MiB"
    for name in (found.name, f"{found.name} {-(-found.total_bytes // 2**30)}GB"):  # of cards that are sold in two sizes
        try:
            card = find_card(name)
        except InputError:
            continue
        return replace(card, name=f"{card.name}:{size}", usable_bytes=found.total_bytes)
    return find_card(size)
