"""Pools: the free blocks that an allocator searches, by request size and stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memcalc.allocator.blocks import Block, FreeBlockSet, Segment
from memcalc.allocator.counters import PoolCounters


class Pool:
    """The blocks of one pool, with one free-block set per stream.

    Args:
        tally: the counters of its type; private pools share them with the default pool.
        small: whether it serves requests of up to 1 MiB.
        by_address: whether the address decides between free blocks of equal size.
        splits: False in memory pools created with no_split.
    """

    __slots__ = ("by_address", "free_sets", "searches", "segments", "small", "splits", "tally")

    def __init__(self, tally: PoolCounters, *, small: bool, by_address: bool, splits: bool = True) -> None:
        self.tally = tally
        self.small = small
        self.by_address = by_address
        self.splits = splits
        self.free_sets: dict[int, FreeBlockSet] = {}
        self.segments: set[Segment] = set()
        self.searches = 0  # counted while garbage collection is on, for the ages of free blocks

    def free_set_of(self, stream: int) -> FreeBlockSet:
        """Return the free-block set of one stream."""
        free_set = self.free_sets.get(stream)
        if free_set is None:
            free_set = self.free_sets[stream] = FreeBlockSet(self, stream, by_address=self.by_address)
        return free_set

    def free_blocks(self) -> list[Block]:
        """Return the free blocks of all streams, in the order of PyTorch's set."""
        return [free_set.blocks[key] for _, free_set in sorted(self.free_sets.items()) for key in free_set.keys]

    def idle_blocks(self) -> list[Block]:
        """Return the free blocks that fill their segment, so that it can be freed to the driver."""
        return [block for block in self.free_blocks() if block.previous is None and block.next is None]

    def cached_bytes(self) -> int:
        """Return the bytes of the free blocks."""
        return sum(block.size for block in self.free_blocks())


@dataclass(slots=True)
class PoolPair:
    """The destination of requests: one pool for small requests and one for large requests."""

    small: Pool
    large: Pool
    use_on_oom: bool = False  # whether other pools may use its free blocks when memory runs out (2.8 and later)

    def __iter__(self) -> Iterator[Pool]:
        """Iterate over both pools, in the order in which PyTorch searches them when memory runs out."""
        return iter((self.small, self.large))
