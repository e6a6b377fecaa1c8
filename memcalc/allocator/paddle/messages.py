"""Paddle's out-of-memory message. Source: paddle cuda_allocator.cc, naive_best_fit_allocator.cc."""

from __future__ import annotations

from memcalc.allocator.driver import Driver
from memcalc.allocator.sizes import MIB


def readable(size: int) -> str:
    """Return bytes as Paddle prints them: 1.500000GB, in powers of 1024."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:f}{units[0]}"


def out_of_memory(size: int, driver: Driver, limit: int, device: int = 0) -> str:
    """Return the message of ResourceExhaustedError, which has several lines.

    Args:
        size: bytes requested from the driver.
        driver: the device.
        limit: FLAGS_gpu_memory_limit_mb in bytes; 0 for none.
        device: index of the device.
    """
    used = driver.capacity - driver.free_bytes
    total = min(driver.capacity, limit) if limit else driver.capacity
    advice = (
        f"Or set environment variable `FLAGS_gpu_memory_limit_mb` to a larger value. Currently "
        f"`FLAGS_gpu_memory_limit_mb` is {limit // MIB}, so the maximum GPU memory usage is limited to {limit // MIB} "
        "MB.\n   The command is `export FLAGS_gpu_memory_limit_mb=xxx`."
        if limit
        else ""
    )
    return (
        f"\n\nOut of memory error on GPU {device}. Cannot allocate {readable(size)} memory on GPU {device}, "
        f"{readable(used)} memory has been allocated and available memory is only {readable(max(0, total - used))}.\n\n"
        f"Please check whether there is any other process using GPU {device}.\n"
        f"1. If yes, please stop them, or start PaddlePaddle on another GPU.\n"
        f"2. If no, please decrease the batch size of your model. {advice}\n"
    )
