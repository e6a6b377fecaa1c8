"""Pools: where free blocks are looked for, by kind of request and by stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memcalc.allocator.blocks import Block, Segment, Shelf
from memcalc.allocator.counters import Tally


class Pool:
    """The blocks of one kind, a shelf for each stream.

    Args:
        tally: the counters of its kind; private pools count with the others.
        small: whether it is for requests of up to 1 MiB.
        by_address: whether an address decides between free blocks of one size.
        splits: False in memory pools that were made with no_split.
    """

    __slots__ = ("by_address", "searches", "segments", "shelves", "small", "splits", "tally")

    def __init__(self, tally: Tally, *, small: bool, by_address: bool, splits: bool = True) -> None:
        self.tally = tally
        self.small = small
        self.by_address = by_address
        self.splits = splits
        self.shelves: dict[int, Shelf] = {}
        self.segments: set[Segment] = set()
        self.searches = 0  # counted while garbage collection is on, for the ages of free blocks

    def shelf(self, stream: int) -> Shelf:
        """The free blocks of one stream."""
        shelf = self.shelves.get(stream)
        if shelf is None:
            shelf = self.shelves[stream] = Shelf(self, stream, by_address=self.by_address)
        return shelf

    def free_blocks(self) -> list[Block]:
        """The free blocks of all streams, in the order of the set that PyTorch keeps them in."""
        return [shelf.blocks[key] for _, shelf in sorted(self.shelves.items()) for key in shelf.keys]

    def idle_blocks(self) -> list[Block]:
        """Those that fill their segment, which can go back to the driver."""
        return [block for block in self.free_blocks() if block.previous is None and block.next is None]

    def cached_bytes(self) -> int:
        """Bytes of its free blocks."""
        return sum(block.size for block in self.free_blocks())


@dataclass(slots=True)
class PoolPair:
    """Where requests go: a pool for the small ones and a pool for the large ones."""

    small: Pool
    large: Pool
    use_on_oom: bool = False  # whether others may have its free blocks when memory runs out (2.8 and later)

    def __iter__(self) -> Iterator[Pool]:
        """Both, in the order in which PyTorch searches them on out of memory."""
        return iter((self.small, self.large))
