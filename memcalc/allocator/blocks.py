"""Blocks, the segments that they divide, and the sorted sets of free ones.

Source: torch c10/cuda/CUDACachingAllocator.cpp: Block, BlockPool, BlockComparatorSize.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from memcalc.allocator.driver import ADDRESS_BITS

if TYPE_CHECKING:  # pools are made of shelves
    from memcalc.allocator.pools import Pool

# States of a block.
IN_USE = 0  # handed out
WAITING = 1  # freed, but other streams may still use it
FREE = 2  # cached
UNMAPPED = 3  # addresses of an expandable segment without memory behind them

# A free block's place in its set is one integer, which compares faster than a tuple: its size in front, then `order`,
# which holds a segment's number above an address.
SIZE_SHIFT = ADDRESS_BITS + 36  # 2^36 segments or blocks will do


class Segment:
    """Memory that came from the driver in one piece, or an expandable range of addresses."""

    __slots__ = ("address", "head", "number", "page", "shelf", "size")

    def __init__(self, address: int, size: int, shelf: Shelf, number: int, page: int = 0) -> None:
        self.address = address
        self.size = size  # bytes; of addresses when expandable
        self.shelf = shelf
        self.number = number  # in the order of creation
        self.page = page  # bytes that are mapped at once; 0 in a segment that cannot expand
        self.head: Block  # the block at its lowest address


class Block:
    """A stretch of one segment: handed out, waiting for other streams, cached, or unmapped.

    `order` is what decides between free blocks of one size, without the address where that has a say.
    """

    __slots__ = (
        "address",
        "key",
        "next",
        "order",
        "previous",
        "requested",
        "segment",
        "shelf",
        "since",
        "size",
        "state",
    )

    def __init__(self, address: int, size: int, segment: Segment, shelf: Shelf, order: int, state: int) -> None:
        self.address = address
        self.size = size
        self.segment = segment
        self.shelf = shelf
        self.order = order
        self.state = state
        self.requested = 0  # bytes asked for by the last to whom it was handed out
        self.previous: Block | None = None
        self.next: Block | None = None
        self.key = 0  # its place among the free blocks
        self.since = 0  # searches of its pool before it was freed, for its age (garbage collection only)


class Shelf:
    """The free blocks of one pool and stream, smallest first; streams never share free blocks."""

    __slots__ = ("address_mask", "blocks", "keys", "pool", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int, *, by_address: bool) -> None:
        self.pool = pool
        self.stream = stream
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.address_mask = -1 if by_address else 0
        self.unmapped: list[tuple[int, Block]] = []  # by address

    def add(self, block: Block) -> None:
        """Puts a block among the free ones."""
        block.state = FREE
        block.key = key = (block.size << SIZE_SHIFT) + block.order + (block.address & self.address_mask)
        block.since = self.pool.searches
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Takes a block out."""
        key = block.key
        keys = self.keys
        del keys[bisect_left(keys, key)]
        del self.blocks[key]

    def at_least(self, size: int) -> int:
        """The position of the smallest free block of at least `size` bytes; the number of blocks where none is."""
        return bisect_left(self.keys, size << SIZE_SHIFT)

    def take(self, size: int) -> Block | None:
        """The smallest free block of at least `size` bytes, taken out; None where none is."""
        at = self.at_least(size)
        return self.blocks.pop(self.keys.pop(at)) if at < len(self.keys) else None

    def add_unmapped(self, block: Block) -> None:
        """Puts a block among the unmapped ones."""
        block.state = UNMAPPED
        insort(self.unmapped, (block.address, block))  # addresses differ: blocks are never compared

    def remove_unmapped(self, block: Block) -> None:
        """Takes a block out of the unmapped ones."""
        del self.unmapped[bisect_left(self.unmapped, block.address, key=_address)]

    def discard(self, block: Block) -> None:
        """Takes a block out, free or unmapped."""
        if block.state == FREE:
            self.remove(block)
        else:
            self.remove_unmapped(block)


def _address(entry: tuple[int, Block]) -> int:
    return entry[0]


def merge(block: Block, neighbour: Block | None) -> int:
    """Makes a neighbour part of `block` when it is in the same state, free or unmapped.

    `block` is in no set itself; it keeps its identity and gets the lower of the two addresses.

    Returns:
        the bytes that it grew by; 0 when the neighbour stays.
    """
    if neighbour is None or neighbour.state != block.state:
        return 0
    block.shelf.discard(neighbour)
    if neighbour is block.previous:
        block.address = neighbour.address
        before = block.previous = neighbour.previous
        if before is None:
            block.segment.head = block
        else:
            before.next = block
    else:
        after = block.next = neighbour.next
        if after is not None:
            after.previous = block
    block.size += neighbour.size
    return neighbour.size


def insert_before(new: Block, block: Block) -> None:
    """Links a new block in front of another one of the same segment."""
    before = block.previous
    new.previous, new.next, block.previous = before, block, new
    if before is None:
        block.segment.head = new
    else:
        before.next = new


def insert_after(new: Block, block: Block) -> None:
    """Links a new block behind another one of the same segment."""
    after = block.next
    new.previous, new.next, block.next = block, after, new
    if after is not None:
        after.previous = new
