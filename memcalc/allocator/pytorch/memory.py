"""Device memory reserved by the PyTorch allocator, within the user's memory fraction.

Source: torch c10/cuda/CUDACachingAllocator.cpp: alloc_block, release_block, setMemoryFraction, BlockComparatorSize.
"""

from __future__ import annotations

from memcalc.allocator.blocks import SIZE_SHIFT, Block, Segment
from memcalc.allocator.counters import Counters
from memcalc.allocator.device import ReservedDeviceMemory
from memcalc.allocator.driver import ADDRESS_BITS, Driver
from memcalc.allocator.pytorch.settings import Settings
from memcalc.allocator.pytorch.versions import Version

assert SIZE_SHIFT > ADDRESS_BITS  # the order of a block holds a segment's number above its address


class LimitedMemory(ReservedDeviceMemory):
    """The device's memory, limited to the user's memory fraction.

    Args:
        driver: the device.
        settings: the limit and the size of segments.
        version: the PyTorch version.
        counters: the counters to update.
    """

    def __init__(self, driver: Driver, settings: Settings, version: Version, counters: Counters) -> None:
        super().__init__(driver, counters)
        self._blocks_made = 0
        self._version = version
        self._tie_break = version.tie_break
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Apply new settings."""
        self.settings = settings
        allowed = settings.memory_fraction * self.driver.capacity
        rounding = 0.5 if self._version.rounds_limit else 0.0
        self.limit = None if settings.memory_fraction >= 1 else int(allowed + rounding)

    def within_limit(self, size: int) -> bool:
        """Return whether the memory fraction allows `size` more reserved bytes."""
        return self.limit is None or self.reserved + size <= self.limit

    def rejects(self, size: int) -> bool:
        """Return whether throw_on_cudamalloc_oom forbids requesting `size` bytes from the driver."""
        settings = self.settings
        if not settings.throw_on_cudamalloc_oom:
            return False
        return self.reserved + size > int(settings.option_fraction * self.driver.capacity)

    def order(self, segment: Segment) -> int:
        """Return the `order` of the next block: by version, the creation order of the block or of its segment, or 0."""
        if self._tie_break == "block":
            self._blocks_made += 1
            return self._blocks_made
        return segment.number << ADDRESS_BITS if self._tie_break == "segment" else 0

    def order_of_part(self, block: Block) -> int:
        """Return the `order` of a part of a block, which is a new block in the same segment."""
        return self.order(block.segment) if self._tie_break == "block" else block.order
