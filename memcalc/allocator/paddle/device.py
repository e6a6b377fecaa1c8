"""Device memory available to Paddle under its own limit.

Source: paddle/fluid/platform/device/gpu/gpu_info.cc: RecordedGpuMallocHelper, GpuAvailableMemToAlloc, GpuInitAllocSize,
GpuReallocSize.
"""

from __future__ import annotations

from memcalc.allocator.blocks import Block, FreeBlockSet
from memcalc.allocator.counters import Counters
from memcalc.allocator.device import ReservedDeviceMemory
from memcalc.allocator.driver import Driver
from memcalc.allocator.paddle.settings import PaddleSettings
from memcalc.allocator.sizes import float32

MIN_CHUNK = 256  # GpuMinChunkSize: alignment of every chunk and block
RESERVE = float32(0.05)  # fraction_reserve_gpu_memory: fraction of free memory that stays unused


class PaddleMemory(ReservedDeviceMemory):
    """The device's memory, within FLAGS_gpu_memory_limit_mb.

    Args:
        driver: the device.
        settings: the limit, and the sizes of chunks.
    """

    def __init__(self, driver: Driver, settings: PaddleSettings) -> None:
        super().__init__(driver, Counters(counts_rejections=False))
        self.settings = settings

    def allocate_segment(self, free_set: FreeBlockSet, size: int) -> Block | None:
        """Allocate a chunk from the driver; None if the driver or the limit has not enough memory."""
        if self.settings.limit and self.reserved + size > self.settings.limit:
            return None
        return super().allocate_segment(free_set, size)

    @property
    def available(self) -> int:
        """Free bytes minus a reserve of 5 %, computed in single precision; 0 if less than one minimum chunk is left."""
        free = self.driver.free_bytes
        if self.settings.limit:
            free = min(free, max(0, self.settings.limit - self.reserved))
        left = free - int(float32(RESERVE * float32(free)))
        return left if left >= MIN_CHUNK else 0

    def chunk_bytes(self, fixed: int) -> int:
        """Return the bytes of a new chunk: `fixed` if set, else the configured fraction of available memory."""
        return fixed or int(self.available * float32(self.settings.fraction))

    def statistics(self) -> dict[str, int]:
        """Return the counters, under the names of paddle.device.cuda."""
        counters = self.counters
        return {
            "max_memory_allocated": counters.peaks.allocated,
            "max_memory_reserved": counters.reserved.peak,
            "memory_allocated": counters.allocated_bytes,
            "memory_reserved": counters.reserved_bytes,
            "num_device_alloc": counters.num_device_alloc,
            "num_device_free": counters.num_device_free,
        }
