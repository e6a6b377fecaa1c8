"""Segments from the driver and back to it, with everything counted."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.allocator.blocks import FREE, Block, Segment, Shelf
from memcalc.allocator.counters import Counters
from memcalc.allocator.driver import Driver


class DeviceMemory:
    """What an allocator holds of the device.

    Args:
        driver: the device.
        counters: where it is counted.
    """

    def __init__(self, driver: Driver, counters: Counters) -> None:
        self.driver = driver
        self.counters = counters
        self.reserved = 0
        self.watch: Callable[[str, int, int, int], None] | None = None  # told action, address, bytes and stream
        self._segments_made = 0

    def order(self, _segment: Segment) -> int:
        """The `order` of the next block, which is a new object in this segment: 0 where only addresses decide."""
        return 0

    def order_of_part(self, block: Block) -> int:
        """The `order` of a new block that is split off from another one."""
        return block.order

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
        self.changed(shelf, address, size, segments=1)
        if size >= self.counters.max_split_size:
            self.counters.oversize_segments.change(1)
        return block

    def give_back(self, block: Block) -> None:
        """Frees the segment that a free block fills."""
        block.shelf.remove(block)
        self.drop(block)

    def drop(self, block: Block) -> None:
        """Frees the segment that a block fills which is in no set."""
        assert block.previous is None
        assert block.next is None
        block.shelf.pool.segments.remove(block.segment)
        self.driver.free(block.address, block.size)
        self.changed(block.shelf, block.address, -block.size, segments=-1)
        if block.size >= self.counters.max_split_size:
            self.counters.oversize_segments.change(-1)

    def changed(self, shelf: Shelf, address: int, size: int, segments: int) -> None:
        """Counts what came from the driver or went back to it."""
        self.reserved += size
        self.counters.reserved_changed(shelf.pool.tally, size, segments)
        if self.watch is not None:
            verb = ("alloc" if size > 0 else "free") if segments else ("map" if size > 0 else "unmap")
            self.watch(f"segment_{verb}", address, abs(size), shelf.stream)
