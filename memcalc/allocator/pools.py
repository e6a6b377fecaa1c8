"""Pools: small and large blocks, of everybody or private to captured graphs.

Source: torch c10/cuda/CUDACachingAllocator.cpp: BlockPool, PrivatePool.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from memcalc.allocator.blocks import Block, Segment, Shelf
from memcalc.allocator.counters import Counters, Tally
from memcalc.allocator.versions import Version


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


@dataclass(slots=True)
class PrivatePools:
    """Memory pools apart from the default one, and where allocations are diverted to at present.

    Used by graph captures and by torch.cuda.use_mem_pool alike.
    """

    counters: Counters
    version: Version
    pools: dict[int, PoolPair] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    diversions: list[tuple[int, AbstractSet[int] | None, bool]] = field(default_factory=list)
    capturing: bool = False  # whether the cache must be left alone and no event may be looked at

    def begin(
        self,
        name: int,
        streams: AbstractSet[int] | None = None,
        *,
        capture: bool = False,
        use_on_oom: bool = False,
        no_split: bool = False,
    ) -> None:
        """Diverts the allocations of some streams (None: of all) to a pool, which is made when it is not there.

        Args:
            name: the pool.
            streams: whose allocations.
            capture: True for a graph capture, False for torch.cuda.use_mem_pool.
            use_on_oom: as in torch.cuda.MemPool, for a pool that is made.
            no_split: likewise.
        """
        if name not in self.pools:
            by_address = self.version.tie_break != "block"
            small, large = (
                Pool(tally, small=is_small, by_address=by_address, splits=not no_split)
                for tally, is_small in ((self.counters.small, True), (self.counters.large, False))
            )
            self.pools[name] = PoolPair(small, large, use_on_oom)
        self.users[name] = self.users.get(name, 0) + 1
        self.diversions.append((name, streams, capture or self.version.pools_are_captures))
        self._note_captures()

    def end(self, name: int) -> None:
        """Ends the diversion to a pool; the pool and its memory stay."""
        self.diversions = [entry for entry in self.diversions if entry[0] != name]
        self._note_captures()

    def release(self, name: int) -> None:
        """One user of the pool (a graph, a MemPool) is gone; without users its free memory can be given back."""
        self.users[name] -= 1

    def for_stream(self, stream: int) -> PoolPair | None:
        """The pool that a stream's allocations are diverted to."""
        for name, streams, _ in self.diversions:
            if streams is None or stream in streams:
                return self.pools[name]
        return None

    def releasable(self) -> list[PoolPair]:
        """The pools without users."""
        return [pair for name, pair in self.pools.items() if not self.users[name]]

    def forget_empty(self) -> None:
        """Drops the pools that have neither users nor memory."""
        for name, pair in list(self.pools.items()):
            if not self.users[name] and not any(pool.segments for pool in pair):
                del self.pools[name], self.users[name]

    def _note_captures(self) -> None:
        self.capturing = any(capture for *_, capture in self.diversions)

    def cached_bytes(self) -> int:
        """Bytes of their free blocks."""
        return sum(pool.cached_bytes() for pair in self.pools.values() for pool in pair)
