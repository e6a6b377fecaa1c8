"""The GPU of this machine, as reported by its NVIDIA driver: `--gpu auto`. It uses no torch and no CUDA context."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from typing import NamedTuple

from memcalc.errors import InputError, Unavailable
from memcalc.spec.hardware.gpus import GpuSpec, find_gpu

_LIBRARIES = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")
_NAME_BYTES = 256  # as in torch (cudaDeviceProp.name)


class LocalGpu(NamedTuple):
    """The first GPU in CUDA_VISIBLE_DEVICES."""

    name: str  # as in torch.cuda.get_device_name
    total_bytes: int  # memory that frameworks can allocate


def local_gpu() -> LocalGpu:
    """Return the driver's first GPU (CUDA driver API: cuDeviceGetName, cuDeviceTotalMem).

    Raises:
        Unavailable: there is no NVIDIA driver, or it finds no GPU.
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


def local_gpu_spec() -> GpuSpec:
    """Return the GPU of this machine: the row of the table with its name, and the memory that its driver reports.

    A GPU that is not in the table is described by its memory only.

    Raises:
        Unavailable: there is no NVIDIA driver, or it finds no GPU.
    """
    found = local_gpu()
    size = f"{found.total_bytes >> 20}MiB"
    for name in (found.name, f"{found.name} {-(-found.total_bytes // 2**30)}GB"):  # for GPUs sold in two sizes
        try:
            gpu = find_gpu(name)
        except InputError:
            continue
        return replace(gpu, name=f"{gpu.name}:{size}", usable_bytes=found.total_bytes)
    return find_gpu(size)
