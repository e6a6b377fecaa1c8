"""Blocks, segments, and the sorted sets of free blocks.

Source: torch c10/cuda/CUDACachingAllocator.cpp: Block, BlockPool, BlockComparatorSize.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from memcalc.allocator.driver import ADDRESS_BITS

if TYPE_CHECKING:  # Pool imports Shelf
    from memcalc.allocator.pools import Pool

# States of a block.
IN_USE = 0  # allocated
WAITING = 1  # freed, but other streams may still use it
FREE = 2  # cached
UNMAPPED = 3  # address range of an expandable segment without mapped memory

# The sort key of a free block is one integer, which compares faster than a tuple: the size in the upper bits, then
# `order`, which holds the segment's number above an address.
SIZE_SHIFT = ADDRESS_BITS + 36  # 36 bits number up to 2^36 segments or blocks


class Segment:
    """Memory from one cudaMalloc, or the address range of an expandable segment."""

    __slots__ = ("address", "free_set", "head", "number", "page", "size")

    def __init__(self, address: int, size: int, free_set: FreeBlockSet, number: int, page: int = 0) -> None:
        self.address = address
        self.size = size  # bytes; of address space if expandable
        self.free_set = free_set
        self.number = number  # in the order of creation
        self.page = page  # bytes mapped at once; 0 if the segment is not expandable
        self.head: Block  # the block at its lowest address


class Block:
    """A contiguous part of one segment: allocated, waiting for other streams, cached, or unmapped.

    `order` decides between free blocks of equal size; the address is added to it where addresses decide.
    """

    __slots__ = (
        "address",
        "free_set",
        "key",
        "next",
        "order",
        "previous",
        "requested",
        "segment",
        "since",
        "size",
        "state",
    )

    def __init__(
        self, address: int, size: int, segment: Segment, free_set: FreeBlockSet, order: int, state: int
    ) -> None:
        self.address = address
        self.size = size
        self.segment = segment
        self.free_set = free_set
        self.order = order
        self.state = state
        self.requested = 0  # bytes requested by the last allocation
        self.previous: Block | None = None
        self.next: Block | None = None
        self.key = 0  # sort key among the free blocks
        self.since = 0  # the pool's number of searches when the block was freed, for its age (garbage collection only)


class FreeBlockSet:
    """The sorted free-block set of one pool and stream, smallest first; streams never share free blocks.

    Args:
        pool: the pool of the blocks.
        stream: number of the CUDA stream.
        by_address: whether the address decides between blocks of equal size.
    """

    __slots__ = ("address_mask", "blocks", "keys", "pool", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int, *, by_address: bool) -> None:
        self.pool = pool
        self.stream = stream
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.address_mask = -1 if by_address else 0
        self.unmapped: list[tuple[int, Block]] = []  # sorted by address

    def add(self, block: Block) -> None:
        """Add a block to the free set."""
        block.state = FREE
        block.key = key = (block.size << SIZE_SHIFT) + block.order + (block.address & self.address_mask)
        block.since = self.pool.searches
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Remove a block from the free set."""
        key = block.key
        keys = self.keys
        del keys[bisect_left(keys, key)]
        del self.blocks[key]

    def at_least(self, size: int) -> int:
        """Return the position of the smallest free block of at least `size` bytes, or the number of blocks if none."""
        return bisect_left(self.keys, size << SIZE_SHIFT)

    def take(self, size: int) -> Block | None:
        """Remove and return the smallest free block of at least `size` bytes; None if there is none."""
        at = self.at_least(size)
        return self.blocks.pop(self.keys.pop(at)) if at < len(self.keys) else None

    def add_unmapped(self, block: Block) -> None:
        """Add a block to the unmapped set."""
        block.state = UNMAPPED
        insort(self.unmapped, (block.address, block))  # addresses differ, so blocks are never compared

    def remove_unmapped(self, block: Block) -> None:
        """Remove a block from the unmapped set."""
        del self.unmapped[bisect_left(self.unmapped, block.address, key=_address)]

    def discard(self, block: Block) -> None:
        """Remove a block from its set, free or unmapped."""
        if block.state == FREE:
            self.remove(block)
        else:
            self.remove_unmapped(block)


def _address(entry: tuple[int, Block]) -> int:
    return entry[0]


def merge(block: Block, neighbor: Block | None) -> int:
    """Merge a neighbor into `block` if it is in the same state, free or unmapped.

    `block` is in no set itself; it keeps its identity and gets the lower of the two addresses.

    Returns:
        the growth of `block` in bytes; 0 if nothing is merged.
    """
    if neighbor is None or neighbor.state != block.state:
        return 0
    block.free_set.discard(neighbor)
    if neighbor is block.previous:
        block.address = neighbor.address
        before = block.previous = neighbor.previous
        if before is None:
            block.segment.head = block
        else:
            before.next = block
    else:
        after = block.next = neighbor.next
        if after is not None:
            after.previous = block
    block.size += neighbor.size
    return neighbor.size


def insert_before(new: Block, block: Block) -> None:
    """Link a new block in front of another one of the same segment."""
    before = block.previous
    new.previous, new.next, block.previous = before, block, new
    if before is None:
        block.segment.head = new
    else:
        before.next = new


def insert_after(new: Block, block: Block) -> None:
    """Link a new block after another one of the same segment."""
    after = block.next
    new.previous, new.next, block.next = block, after, new
    if after is not None:
        after.previous = new
