"""What the driver says of a GPU, whoever uses it: NVML by nvidia-ml-py, else nvidia-smi."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

# Less than any CUDA context takes (300 MiB and more: memcalc/data/gpus.yaml), more than a screen's frame buffers.
# Used where the driver does not tell whose the memory is, as in most containers.
SOMEBODYS_BYTES = 256 * 2**20

SECONDS = 20.0  # nvidia-smi answers in less, unless the driver hangs


class View(NamedTuple):
    """A GPU at one moment.

    Args:
        used_bytes: by everybody, without what the driver reserves for itself.
        others: processes that have memory on it, this one excepted.
        release: of the driver.
    """

    used_bytes: int
    others: tuple[int, ...]
    release: str

    @property
    def busy(self) -> bool:
        """Whether somebody computes on it: asked before this process does."""
        return bool(self.others) or self.used_bytes >= SOMEBODYS_BYTES


def look(device: torch.device, own: int) -> View | None:
    """The GPU now; None where nobody can be asked.

    Args:
        device: as PyTorch counts, CUDA_VISIBLE_DEVICES applied.
        own: this process's number.
    """
    try:
        # What PyTorch itself asks NVML by (torch.cuda.device_memory_used); it has no public name.
        index: int = torch.cuda._get_nvml_device_index(device)  # noqa: SLF001
    except (RuntimeError, IndexError):
        index = device.index or 0
    return _by_library(index, own) or _by_program(index, own)


def used_by_all(device: torch.device) -> tuple[str, Callable[[], int]]:
    """Who can be asked often what is in use on a device, and the question. Bytes."""
    handle = None
    with suppress(Exception):  # NVML has an exception for each of its reasons not to answer
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


def _by_library(index: int, own: int) -> View | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        release = str(pynvml.nvmlSystemGetDriverVersion())
        return View(_used(handle), tuple(found.pid for found in processes if found.pid != own), release)
    except pynvml.NVMLError:
        return None


def _used(handle: Any) -> int:
    """What is used without what the driver keeps for itself, which the first version of the question counts too."""
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    except pynvml.NVMLError:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def _by_program(index: int, own: int) -> View | None:
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
        return View(int(used) * 2**20, tuple(pid for pid in others if pid != own), release)
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None
