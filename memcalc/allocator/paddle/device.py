"""Paddle's share of the device: what its own limit leaves of it.

Source: paddle/fluid/platform/device/gpu/gpu_info.cc: RecordedGpuMallocHelper, GpuAvailableMemToAlloc, GpuInitAllocSize,
GpuReallocSize.
"""

from __future__ import annotations

from memcalc.allocator.blocks import Block, Shelf
from memcalc.allocator.counters import Counters
from memcalc.allocator.device import DeviceMemory
from memcalc.allocator.driver import Driver
from memcalc.allocator.paddle.settings import Settings
from memcalc.allocator.single import float32

MIN_CHUNK = 256  # GpuMinChunkSize: alignment of everything
RESERVE = float32(0.05)  # fraction_reserve_gpu_memory: of what is free, kept back


class PaddleMemory(DeviceMemory):
    """The device's memory, within FLAGS_gpu_memory_limit_mb.

    Args:
        driver: the device.
        settings: the limit, and the sizes of chunks.
    """

    def __init__(self, driver: Driver, settings: Settings) -> None:
        super().__init__(driver, Counters(counts_rejections=False))
        self.settings = settings

    def fetch(self, shelf: Shelf, size: int) -> Block | None:
        """A chunk from the driver; None when the driver or the limit has not that much."""
        if self.settings.limit and self.reserved + size > self.settings.limit:
            return None
        return super().fetch(shelf, size)

    @property
    def available(self) -> int:
        """Free bytes, but for a reserve of 5 % that is computed in single precision; 0 when next to none are left."""
        free = self.driver.free_bytes
        if self.settings.limit:
            free = min(free, max(0, self.settings.limit - self.reserved))
        left = free - int(float32(RESERVE * float32(free)))
        return left if left >= MIN_CHUNK else 0

    def share(self, fixed: int) -> int:
        """Bytes of a new chunk: `fixed` where that is set, else the fraction of what is available now."""
        return fixed or int(self.available * float32(self.settings.fraction))

    def statistics(self) -> dict[str, int]:
        """Under the names of paddle.device.cuda."""
        counters = self.counters
        return {
            "max_memory_allocated": counters.peaks.allocated,
            "max_memory_reserved": counters.reserved.peak,
            "memory_allocated": counters.allocated_bytes,
            "memory_reserved": counters.reserved_bytes,
            "num_device_alloc": counters.num_device_alloc,
            "num_device_free": counters.num_device_free,
        }
