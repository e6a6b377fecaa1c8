"""Segments from the driver and back to it, within the limit that the user set.

Source: torch c10/cuda/CUDACachingAllocator.cpp: alloc_block, release_block, setMemoryFraction.
"""

from __future__ import annotations

from memcalc.allocator.blocks import FREE, SIZE_SHIFT, Block, Segment, Shelf
from memcalc.allocator.counters import Counters
from memcalc.allocator.driver import ADDRESS_BITS, Driver
from memcalc.allocator.settings import Settings
from memcalc.allocator.versions import Version

assert SIZE_SHIFT > ADDRESS_BITS  # the order of a block has room for a segment's number above its address


class DeviceMemory:
    """What the allocator holds of the device, and how it comes by more.

    Args:
        driver: the device.
        settings: the limit and the size of segments.
        version: the release whose rules hold.
        counters: where it is counted.
    """

    def __init__(self, driver: Driver, settings: Settings, version: Version, counters: Counters) -> None:
        self.driver = driver
        self.counters = counters
        self.reserved = 0
        self.blocks_made = 0
        self._segments_made = 0
        self._version = version
        self._tie_break = version.tie_break
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Takes new settings over."""
        self.settings = settings
        allowed = settings.memory_fraction * self.driver.capacity
        rounding = 0.5 if self._version.rounds_limit else 0.0
        self.limit = None if settings.memory_fraction >= 1 else int(allowed + rounding)

    def within_limit(self, size: int) -> bool:
        """Whether the user lets the allocator hold `size` more bytes."""
        return self.limit is None or self.reserved + size <= self.limit

    def rejects(self, size: int) -> bool:
        """Whether throw_on_cudamalloc_oom forbids asking the driver for `size` bytes."""
        settings = self.settings
        if not settings.throw_on_cudamalloc_oom:
            return False
        return self.reserved + size > int(settings.option_fraction * self.driver.capacity)

    def order(self, segment: Segment) -> int:
        """The `order` of the next block, which is a new object in this segment."""
        self.blocks_made += 1
        if self._tie_break == "block":
            return self.blocks_made
        return segment.number << ADDRESS_BITS if self._tie_break == "segment" else 0

    def new_segment(self, shelf: Shelf, address: int, size: int, page: int = 0) -> Segment:
        """A segment without blocks."""
        self._segments_made += 1
        segment = Segment(address, size, shelf, self._segments_made, page)
        shelf.pool.segments.add(segment)
        return segment

    def new_block(self, segment: Segment, address: int, size: int, state: int = FREE) -> Block:
        """A block that is not linked to others yet."""
        return Block(address, size, segment, segment.shelf, self.order(segment), state)

    def fetch(self, shelf: Shelf, size: int) -> Block | None:
        """A new segment of `size` bytes as one block, in no set; None when the driver has not that much."""
        address = self.driver.malloc(size)
        if address is None:
            return None
        segment = self.new_segment(shelf, address, size)
        segment.head = block = self.new_block(segment, address, size)
        self.changed(shelf, size, segments=1)
        if size >= self.settings.max_split_size:
            self.counters.oversize_segments.change(1)
        return block

    def give_back(self, block: Block) -> None:
        """Frees the segment that a free block fills."""
        assert block.previous is None
        assert block.next is None
        block.shelf.remove(block)
        block.shelf.pool.segments.remove(block.segment)
        self.driver.free(block.address, block.size)
        self.changed(block.shelf, -block.size, segments=-1)
        if block.size >= self.settings.max_split_size:
            self.counters.oversize_segments.change(-1)

    def changed(self, shelf: Shelf, size: int, segments: int) -> None:
        """Counts what came from the driver or went back to it."""
        self.reserved += size
        self.counters.reserved_changed(shelf.pool.tally, size, segments)
