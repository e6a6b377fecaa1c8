"""The best-fit allocator with coalescing of TensorFlow, which JAX uses too.

Source: tsl/framework/bfc_allocator.cc: AllocateRawInternal, Extend, FindChunkPtr, DeallocateFreeRegions, FreeAndMaybe-
Coalesce. Its bins hold chunks by powers of two and are searched upwards, each by (size, address). Together that is one
order by (size, address), so one free-block set models them.
"""

from __future__ import annotations

from memcalc.allocator.base import BlockAllocator
from memcalc.allocator.blocks import Block
from memcalc.allocator.counters import Counters
from memcalc.allocator.device import ReservedDeviceMemory
from memcalc.allocator.driver import Driver
from memcalc.allocator.pools import Pool
from memcalc.allocator.sizes import MIB, float32, multiple
from memcalc.allocator.snapshot import views
from memcalc.allocator.tensorflow.settings import TensorFlowSettings, reserve
from memcalc.allocator.views import SegmentView
from memcalc.errors import OutOfMemory

ALIGNMENT = 256  # kMinAllocationSize
FIRST_REGION = 2 * MIB  # with allow_growth
LARGEST_REST = 128 * MIB  # kMaxInternalFragmentation: a larger remainder of a chunk is always split off
BACKPEDAL = float32(0.9)  # kBackpedalFactor: if the driver cannot allocate a region, a smaller one is tried


class BfcAllocator(BlockAllocator):
    """The allocator of one device.

    Args:
        settings: the options.
        driver: the device; None for a device that never runs out of memory.
        capability_major: its major compute capability, which determines the memory left to the system.
    """

    def __init__(
        self,
        settings: TensorFlowSettings | None = None,
        driver: Driver | None = None,
        capability_major: int | None = None,
    ) -> None:
        self.settings = settings = settings or TensorFlowSettings()
        self.driver = driver or Driver()
        super().__init__(ReservedDeviceMemory(self.driver, Counters(counts_rejections=False)))
        self._pool = Pool(self.counters.large, small=False, by_address=True)
        self._free_set = self._pool.free_set_of(0)  # shared by all streams
        if settings.memory_fraction is not None:
            self.limit = int(settings.memory_fraction * self.driver.capacity)
        else:
            available = self.driver.free_bytes
            self.limit = max(0, available - reserve(available, capability_major))
        self._region = multiple(min(self.limit, FIRST_REGION) if settings.allow_growth else self.limit, ALIGNMENT)
        fraction = settings.fragmentation_fraction
        self._largest_rest = int(fraction * self.limit) if fraction else LARGEST_REST
        self._largest = 0

    def malloc(self, size: int, stream: int = 0) -> Block:  # noqa: ARG002 - one pool for all streams
        """Allocate the front of the smallest free chunk that is large enough, or all of it if little remains.

        Raises:
            OutOfMemory: with TensorFlow's message.
        """
        if self.uses.waiting:
            self.uses.process()
        rounded = multiple(size, ALIGNMENT)
        block = self._find(rounded)
        if block is None and self._free_regions(rounded) and self._extend(rounded):
            block = self._free_set.take(rounded)
        if block is None:
            self.counters.num_ooms += 1
            raise OutOfMemory(out_of_memory(size, rounded))
        if block.size >= 2 * rounded or block.size - rounded >= self._largest_rest:
            block = self._split_front(block, rounded)
        else:
            self._take_whole(block)
        self._hand_out(block, size)
        self._largest = max(self._largest, block.size)
        return block

    def empty_cache(self) -> None:
        """Wait for other streams. TensorFlow has no such call, and frees regions only when it runs out of memory."""
        self.uses.synchronize()

    def statistics(self) -> dict[str, int]:
        """Return the counters, under the names of tf.config.experimental.get_memory_info and tsl::AllocatorStats."""
        counters = self.counters
        return {
            "bytes_in_use": counters.allocated_bytes,
            "bytes_limit": self.limit,
            "largest_alloc_size": self._largest,
            "num_allocs": counters.large.allocations_added,
            "peak_bytes_in_use": counters.peaks.allocated,
            "peak_pool_bytes": counters.reserved.peak,
            "pool_bytes": counters.reserved_bytes,
        }

    def segments(self) -> tuple[SegmentView, ...]:
        """Return the regions, sorted by address."""
        return views((0, region) for region in self._pool.segments)

    def _find(self, size: int) -> Block | None:
        block = self._free_set.take(size)
        if block is None and self._extend(size):
            block = self._free_set.take(size)
        return block

    def _extend(self, size: int) -> bool:
        """Add a new free region; return whether memory sufficed."""
        left = (self.limit - self.device.reserved) // ALIGNMENT * ALIGNMENT
        if size > left:
            return False
        doubled = False
        while size > self._region:
            self._region *= 2
            doubled = True
        region = min(self._region, left)
        block = self.device.allocate_segment(self._free_set, region)
        while block is None:
            region = multiple(int(float32(float32(region) * BACKPEDAL)), ALIGNMENT)
            if region < size:
                return False
            block = self.device.allocate_segment(self._free_set, region)
        if not doubled:
            self._region *= 2
        self._free_set.add(block)
        return True

    def _free_regions(self, size: int) -> bool:
        """Free all regions without a chunk in use, if that makes enough room; return whether it did."""
        if not self.settings.garbage_collection:
            return False
        free = self._pool.idle_blocks()
        if not free or size > self.limit - self.device.reserved + sum(block.size for block in free):
            return False
        for block in free:
            self.device.free_segments(block)
        return True


def readable(size: int) -> str:
    """Return bytes as TensorFlow prints them: 512B, 1.50KiB, 1.24GiB."""
    if size < 1024:
        return f"{size}B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024 or unit == "GiB":
            break
    return f"{value:.2f}{unit}"


def out_of_memory(size: int, rounded: int) -> str:
    """Return the first line of the allocator's report."""
    return (
        f"Allocator (GPU_0_bfc) ran out of memory trying to allocate {readable(size)} (rounded to {rounded}). "
        "Current allocation summary follows."
    )
