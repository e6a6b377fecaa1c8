"""Selection of the device to measure on, and its description with the software around it."""

from __future__ import annotations

import ctypes
import os
import platform
import warnings
from contextlib import suppress
from importlib import metadata

import torch

from memcalc.errors import InputError, Unavailable
from memcalc.measuring.measurement import MeasuredDevice
from memcalc.measuring.nvml import View
from memcalc.units import whole_number

# Set by the parent of a process on the null CUDA device: the emulated GPU.
NULL_CARD = "MEMCALC_NULL_CARD"

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")

OTHER_WAYS = (
    "or measure small models on the CPU with `--device cpu`; `memcalc trace` and `memcalc estimate` need no GPU."
)


def find_device(name: str | None) -> torch.device:
    """Return the device with this name; without a name, the GPU.

    Raises:
        InputError: there is no such type of device.
        Unavailable: PyTorch finds no GPU, or cannot use it.
    """
    kind, _, index = (name or "cuda").partition(":")
    number = whole_number(index or "0")
    if kind not in ("cuda", "cpu") or number is None:
        raise InputError(f"device = {name!r} cannot be measured.", "Name cuda, cuda:1 or cpu.", "--device")
    if kind == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's warning would repeat the message below
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise Unavailable(f"measure needs a GPU, but {why_no_gpu()}; {OTHER_WAYS}")
    if number >= count:
        raise Unavailable(f"device = {name}, but there are {count} GPUs, counted from 0.")
    return torch.device("cuda", number)


def why_no_gpu() -> str:
    """Return why PyTorch finds no GPU, and the remedy."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA. Install a CUDA build of torch where `nvidia-smi` lists a GPU"
    driver = driver_version()
    if driver is None:
        return "no NVIDIA driver is installed. Use a machine where `nvidia-smi` lists a GPU"
    major, needed = int(driver.partition(".")[0]), int(torch.version.cuda.partition(".")[0])
    if major < needed:  # drivers are compatible within a major version
        return (
            f"its driver is too old: it knows CUDA {driver}, and this PyTorch is built for CUDA {torch.version.cuda}. "
            f"Update the driver, or install a torch for CUDA {major}"
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "PyTorch sees none" + (f" (CUDA_VISIBLE_DEVICES={hidden})" if hidden is not None else "")


def describe_device(device: torch.device, view: View | None = None, context: int | None = None) -> MeasuredDevice:
    """Return the description of a device for results and records.

    Args:
        device: any device.
        view: the driver's view of it before the run.
        context: bytes of the CUDA context.
    """
    if device.type == "cpu":
        return MeasuredDevice("cpu", "cpu", platform.processor() or platform.machine())
    properties = torch.cuda.get_device_properties(device)
    gpu = os.environ.get(NULL_CARD)
    return MeasuredDevice(
        kind="cuda" if gpu is None else "null cuda",
        identifier=str(device) if gpu is None else f"null:{gpu}",
        name=properties.name,
        total_bytes=properties.total_memory,
        driver=driver_version(),
        release=None if view is None else view.release,
        others_bytes=None if view is None else view.used_bytes,
        context_bytes=context,
    )


def driver_version() -> str | None:
    """Return the CUDA version of the driver; None if it is not installed."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def software() -> dict[str, str]:
    """Return the software versions that a figure depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        with suppress(AttributeError, RuntimeError):  # a build without NCCL
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    for package in ("transformers", "peft", "bitsandbytes"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def allocator_settings() -> str:
    """Return the allocator settings of the environment, as they would be typed."""
    return " ".join(f"{name}={os.environ[name]}" for name in ALLOCATOR_VARIABLES if os.environ.get(name))
