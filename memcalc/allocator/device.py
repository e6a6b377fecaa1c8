"""Allocation of segments from the driver and their release, with counters."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.allocator.blocks import FREE, Block, FreeBlockSet, Segment
from memcalc.allocator.counters import Counters
from memcalc.allocator.driver import Driver


class ReservedDeviceMemory:
    """The device memory that an allocator has reserved."""

    def __init__(self, driver: Driver, counters: Counters) -> None:
        self.driver = driver
        self.counters = counters
        self.reserved = 0
        self.watch: Callable[[str, int, int, int], None] | None = None  # called with action, address, bytes and stream
        self._segments_made = 0

    def order(self, _segment: Segment) -> int:
        """Return the `order` of the next block, a new object in this segment; 0 if only addresses decide."""
        return 0

    def order_of_part(self, block: Block) -> int:
        """Return the `order` of a new block that is split off from another one."""
        return block.order

    def new_segment(self, free_set: FreeBlockSet, address: int, size: int, page: int = 0) -> Segment:
        """Create a segment without blocks."""
        self._segments_made += 1
        segment = Segment(address, size, free_set, self._segments_made, page)
        free_set.pool.segments.add(segment)
        return segment

    def new_block(self, segment: Segment, address: int, size: int, state: int = FREE) -> Block:
        """Create a block that is not linked to others yet."""
        return Block(address, size, segment, segment.free_set, self.order(segment), state)

    def allocate_segment(self, free_set: FreeBlockSet, size: int) -> Block | None:
        """Allocate a segment of `size` bytes and return it as one block, in no set; None if memory runs out."""
        address = self.driver.malloc(size)
        if address is None:
            return None
        segment = self.new_segment(free_set, address, size)
        segment.head = block = self.new_block(segment, address, size)
        self.changed(free_set, address, size, segments=1)
        if size >= self.counters.max_split_size:
            self.counters.oversize_segments.change(1)
        return block

    def free_segments(self, block: Block) -> None:
        """Free the segment that one free block fills, to the driver."""
        block.free_set.remove(block)
        self.drop(block)

    def drop(self, block: Block) -> None:
        """Free the segment of a block that fills it and is in no set, to the driver."""
        assert block.previous is None
        assert block.next is None
        block.free_set.pool.segments.remove(block.segment)
        self.driver.free(block.address, block.size)
        self.changed(block.free_set, block.address, -block.size, segments=-1)
        if block.size >= self.counters.max_split_size:
            self.counters.oversize_segments.change(-1)

    def changed(self, free_set: FreeBlockSet, address: int, size: int, segments: int) -> None:
        """Count memory that was allocated from the driver (size > 0) or freed to it (size < 0)."""
        self.reserved += size
        self.counters.reserved_changed(free_set.pool.tally, size, segments)
        if self.watch is not None:
            verb = ("alloc" if size > 0 else "free") if segments else ("map" if size > 0 else "unmap")
            self.watch(f"segment_{verb}", address, abs(size), free_set.stream)
