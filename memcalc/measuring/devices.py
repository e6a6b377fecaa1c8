"""Which device to measure on, and how to name it and the software around it."""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from importlib import metadata

import torch

from memcalc.errors import InputError, Unavailable
from memcalc.measuring.measurement import Device

# Set by whoever starts a process on the null CUDA device: the card that it stands for.
NULL_CARD = "MEMCALC_NULL_CARD"

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")


def find_device(name: str | None) -> torch.device:
    """The device of that name; without a name, the GPU.

    Raises:
        InputError: there is no kind of device of that name.
        Unavailable: PyTorch sees no GPU.
    """
    kind, _, index = (name or "cuda").partition(":")
    if kind not in ("cuda", "cpu") or not (index.isdecimal() or index == ""):
        raise InputError(f"device = {name!r} cannot be measured.", "Name cuda, cuda:1 or cpu.", "--device")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch sees no GPU"
        raise Unavailable(
            f"measure needs a GPU, but {reason}. Run it where `nvidia-smi` lists one, with a CUDA build of torch; "
            "or measure small models on the CPU with `--device cpu`; `memcalc estimate` needs neither."
        )
    number = int(index or 0)
    if number >= torch.cuda.device_count():
        raise Unavailable(f"device = {name}, but there are {torch.cuda.device_count()} GPUs, counted from 0.")
    return torch.device("cuda", number)


def describe_device(device: torch.device) -> Device:
    """The device as results and records name it."""
    if device.type == "cpu":
        return Device("cpu", "cpu", platform.processor() or platform.machine(), None, None)
    properties = torch.cuda.get_device_properties(device)
    card = os.environ.get(NULL_CARD)
    return Device(
        kind="cuda" if card is None else "null cuda",
        identifier=str(device) if card is None else f"null:{card}",
        name=properties.name,
        total_bytes=properties.total_memory,
        driver=driver_version(),
    )


def driver_version() -> str | None:
    """The CUDA version of the driver; None where it cannot be asked."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def software() -> dict[str, str]:
    """Versions that a figure depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    with suppress(metadata.PackageNotFoundError):
        found["transformers"] = metadata.version("transformers")
    return found


def allocator_settings() -> str:
    """What the environment tells PyTorch's caching allocator, as it would be typed."""
    return " ".join(f"{name}={os.environ[name]}" for name in ALLOCATOR_VARIABLES if name in os.environ)
