"""PyTorch's out-of-memory messages, word for word.

Source: torch c10/cuda/CUDACachingAllocator.cpp: malloc, format_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memcalc.allocator.pytorch.versions import Version

BEYOND_AN_EXABYTE = "CUDA out of memory. Tried to allocate more than 1EB memory."


def format_size(size: int) -> str:
    """Return bytes as PyTorch prints them. 1024 MiB is "1024.00 MiB": a unit is used only above its own size."""
    if size <= 2**10:
        return f"{size} bytes"
    for exponent, unit in ((10, "KiB"), (20, "MiB")):
        if size <= 2 ** (exponent + 10):
            return f"{size / 2**exponent:.2f} {unit}"
    return f"{size / 2**30:.2f} GiB"


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on the device, as NVML lists it."""

    pid: int | None  # None is the process that ran out of memory
    bytes: int

    def __str__(self) -> str:
        """Return the process's sentence of the message."""
        if self.pid is None:
            return f"Including non-PyTorch memory, this process has {format_size(self.bytes)} memory in use. "
        return f"Process {self.pid} has {format_size(self.bytes)} memory in use. "


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryFigures:
    """The figures of an out-of-memory message, in bytes, after the cache was emptied."""

    segment: int  # requested from the driver
    capacity: int
    free: int
    allocated: int
    reserved: int
    private: int = 0  # cached in private pools
    allowed: int | None = None  # None without a memory fraction
    device: int = 0
    processes: Sequence[DeviceProcess] = ()  # in NVML's order; empty if NVML is not available


def out_of_memory(shortage: OutOfMemoryFigures, version: Version) -> str:
    """Return the message of torch.OutOfMemoryError, one line."""
    s = shortage
    advice = (
        f" If reserved but unallocated memory is large try setting {version.advised_variable}=expandable_segments:True"
        f" to avoid fragmentation.  See documentation for Memory Management  ({version.advised_page})"
    )
    parts = [
        f"CUDA out of memory. Tried to allocate {format_size(s.segment)}. ",
        f"GPU {s.device} has a total capacity of {format_size(s.capacity)} of which {format_size(s.free)} is free. ",
        *map(str, s.processes),
        "" if s.allowed is None else f"{format_size(s.allowed)} allowed; ",
        f"Of the allocated memory {format_size(s.allocated + s.private)} is allocated by PyTorch, ",
        f"with {format_size(s.private)} allocated in private pools (e.g., CUDA Graphs), " if s.private else "",
        f"and {format_size(s.reserved - s.allocated - s.private)} is reserved by PyTorch but unallocated.",
        advice,
    ]
    return "".join(parts)


def rejected(size: int) -> str:
    """Return the message under throw_on_cudamalloc_oom (2.12 and later), which names the request, not the segment."""
    return (
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
        f"per_process_memory_fraction limit. Requested size: {format_size(size)}"
    )
