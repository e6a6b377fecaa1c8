"""The common part of all allocators: split, allocate and merge blocks, and wait for other streams."""

from __future__ import annotations

from abc import ABC, abstractmethod

from memcalc.allocator.blocks import FREE, IN_USE, WAITING, Block, merge
from memcalc.allocator.counters import Counters
from memcalc.allocator.device import ReservedDeviceMemory
from memcalc.allocator.streams import StreamUses
from memcalc.allocator.views import SegmentView


class BlockAllocator(ABC):
    """An allocator that divides segments into blocks.

    Args:
        memory: the device, the segments allocated on it, and the counters.
    """

    def __init__(self, memory: ReservedDeviceMemory) -> None:
        self.device = memory
        self.counters: Counters = memory.counters
        self.uses = StreamUses(self._completed)

    @abstractmethod
    def malloc(self, size: int, stream: int = 0) -> Block:
        """Allocate a block for `size` bytes, at least 1.

        Raises:
            OutOfMemory: with the framework's message, if the device has not enough free memory.
        """

    @abstractmethod
    def empty_cache(self) -> None:
        """Free cached memory to the driver, if the framework can."""

    @abstractmethod
    def statistics(self) -> dict[str, int]:
        """Return the counters, under the framework's names."""

    @abstractmethod
    def segments(self) -> tuple[SegmentView, ...]:
        """Return the segments, sorted by address."""

    def free(self, block: Block) -> None:
        """Free a block; it is reusable once the other streams that used it are done."""
        self.counters.count_freed(block.free_set.pool.tally, block.size)
        if self.uses.used and block in self.uses.used:
            self._wait(block)
            self.uses.freed(block, capturing=self.is_capturing)
        else:
            self._free(block)

    def free_until_completed(self, block: Block) -> None:
        """Free a block that becomes reusable when `complete` is called, as in a recorded event stream."""
        self.counters.count_freed(block.free_set.pool.tally, block.size)
        self._wait(block)
        self.uses.defer(block)

    def complete(self, block: Block) -> None:
        """Make a freed block reusable, because the other streams are done with it."""
        self.uses.complete(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Record that another stream uses the block, too."""
        self.uses.record(block, stream)

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured; during a capture no CUDA event may be queried."""
        return False

    def _hand_out(self, block: Block, requested: int) -> None:
        """Mark and count a block, which is in no free set, as allocated."""
        block.state = IN_USE
        block.requested = requested
        self.counters.count_allocated(block.free_set.pool.tally, block.size, requested)

    def _take_whole(self, block: Block) -> None:
        """Count a free block that is allocated without a split."""
        if (block.previous is not None or block.next is not None) and not block.segment.page:
            self.counters.inactive_changed(block.free_set.pool.tally, -block.size, -1)

    def _split_front(self, block: Block, size: int) -> Block:
        """Split off the front of a block and return it as a new block; the remainder keeps its identity and is free."""
        segment, free_set, before = block.segment, block.free_set, block.previous
        front = Block(block.address, size, segment, free_set, self.device.order_of_part(block), IN_USE)
        front.next = block
        front.previous = before
        if before is None:
            segment.head = front
        else:
            before.next = front
        self._count_split(block, size)
        block.previous = front
        block.address += size
        block.size -= size
        free_set.add(block)
        return front

    def _split_tail(self, block: Block, size: int) -> Block:
        """Split off the tail of a block and return it as a new block; the remainder keeps its identity and is free."""
        segment, free_set, after = block.segment, block.free_set, block.next
        address = block.address + block.size - size
        tail = Block(address, size, segment, free_set, self.device.order_of_part(block), IN_USE)
        tail.previous = block
        tail.next = after
        if after is not None:
            after.previous = tail
        self._count_split(block, size)
        block.next = tail
        block.size -= size
        free_set.add(block)
        return tail

    def _count_split(self, block: Block, size: int) -> None:
        """Count the remainder of a block of which `size` bytes are allocated; called before the new block is linked."""
        if block.segment.page:
            return
        tally = block.free_set.pool.tally
        if block.previous is None and block.next is None:
            self.counters.inactive_changed(tally, block.size - size, 1)
        else:
            self.counters.inactive_changed(tally, -size, 0)

    def _free(self, block: Block) -> None:
        """Add a block to the free set, merged with its free neighbors."""
        free_set = block.free_set
        tally = free_set.pool.tally
        tally.requested_now -= block.requested
        block.state = FREE
        change, blocks = 0, 0
        previous, following = block.previous, block.next
        if previous is not None and previous.state == FREE:
            change -= merge(block, previous)
            blocks -= 1
        if following is not None and following.state == FREE:
            change -= merge(block, following)
            blocks -= 1
        if not block.segment.page:
            if block.previous is not None or block.next is not None:
                change += block.size
                blocks += 1
            if change:
                self.counters.inactive_changed(tally, change, blocks)
        free_set.add(block)

    def _wait(self, block: Block) -> None:
        """Keep a freed block active until other streams are done."""
        self.counters.waiting_changed(block.free_set.pool.tally, block.size, 1)
        block.state = WAITING

    def _completed(self, block: Block) -> None:
        """Free a block that waited for other streams."""
        self.counters.waiting_changed(block.free_set.pool.tally, -block.size, -1)
        self._free(block)
