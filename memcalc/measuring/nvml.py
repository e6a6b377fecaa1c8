"""The driver's view of a GPU, across processes: from NVML by nvidia-ml-py, else from nvidia-smi."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

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
