"""Selection of the device to measure on, and its description with the software around it, by NVML too."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from typing import Any, NamedTuple

import torch

from memcalc.errors import InputError, Unavailable
from memcalc.measuring.measurement import MeasuredDevice
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


# Less than any CUDA context (300 MiB and more: memcalc/data/gpus.yaml), more than a display's frame buffers. Decides
# where the driver does not report processes, as in most containers.
SOMEBODYS_BYTES = 256 * 2**20

SECONDS = 20.0  # nvidia-smi answers faster, unless the driver hangs


class View(NamedTuple):
    """State of a GPU at one time."""

    used_bytes: int  # bytes used by all processes, without the driver's own reservation
    other_pids: tuple[int, ...]  # ids of other processes that have memory on it
    release: str  # version of the driver

    @property
    def busy(self) -> bool:
        """Whether another process computes on the GPU; valid before this process uses it."""
        return bool(self.other_pids) or self.used_bytes >= SOMEBODYS_BYTES


def look(device: torch.device, own_pid: int) -> View | None:
    """Return the current state of the GPU; None if neither NVML nor nvidia-smi reports it.

    Args:
        device: by PyTorch's index, with CUDA_VISIBLE_DEVICES applied.
        own_pid: id of this process.
    """
    try:
        # The function that torch.cuda.device_memory_used uses; it has no public name.
        index: int = torch.cuda._get_nvml_device_index(device)  # noqa: SLF001
    except (RuntimeError, IndexError):
        index = device.index or 0
    return _by_library(index, own_pid) or _by_program(index, own_pid)


def used_by_all(device: torch.device) -> tuple[str, Callable[[], int]]:
    """Return the source of a device's used bytes, and a fast function that reads them."""
    handle = None
    with suppress(Exception):  # NVML has one exception per reason
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(device))  # noqa: SLF001 -- as above
        _used(handle)
    if handle is not None:
        return "nvml", lambda: _used(handle)

    def by_driver() -> int:
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    return "driver", by_driver


def _by_library(index: int, own_pid: int) -> View | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        release = str(pynvml.nvmlSystemGetDriverVersion())
        return View(_used(handle), tuple(found.pid for found in processes if found.pid != own_pid), release)
    except pynvml.NVMLError:
        return None


def _used(handle: Any) -> int:
    """Return the used bytes without the driver's own reservation, which the first version of this call includes."""
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    except pynvml.NVMLError:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def _by_program(index: int, own_pid: int) -> View | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None

    def ask(question: str) -> list[str]:
        command = [program, f"--id={index}", question, "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)  # noqa: S603 -- found on the path
        return done.stdout.strip().splitlines()

    try:
        used, release = ask("--query-gpu=memory.used,driver_version")[0].split(", ")
        others = [int(line) for line in ask("--query-compute-apps=pid") if line.strip().isdecimal()]
        return View(int(used) * 2**20, tuple(pid for pid in others if pid != own_pid), release)
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None
