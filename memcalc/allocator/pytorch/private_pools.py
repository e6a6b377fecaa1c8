"""Additional memory pools: of captured graphs and of torch.cuda.MemPool.

Source: torch c10/cuda/CUDACachingAllocator.cpp: PrivatePool, beginAllocateToPool.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from memcalc.allocator.counters import Counters
from memcalc.allocator.pools import Pool, PoolPair
from memcalc.allocator.pytorch.versions import Version


@dataclass(slots=True)
class PrivatePools:
    """The additional memory pools, and the current diversion of allocations to them.

    Used both by graph captures and by torch.cuda.use_mem_pool.
    """

    counters: Counters  # shared with the default pool
    version: Version  # the PyTorch version
    pools: dict[int, PoolPair] = field(default_factory=dict)  # by name
    users: dict[int, int] = field(default_factory=dict)  # number of users (graphs, MemPools) of each pool, by name
    # active ones: name of the pool, streams (None: all), and whether it is a graph capture
    diversions: list[tuple[int, AbstractSet[int] | None, bool]] = field(default_factory=list)
    capturing: bool = False  # whether the cache must not be emptied and no CUDA event may be queried

    def begin(
        self,
        name: int,
        streams: AbstractSet[int] | None = None,
        *,
        capture: bool = False,
        use_on_oom: bool = False,
        no_split: bool = False,
    ) -> None:
        """Divert the allocations of some streams (None: of all) to a pool, which is created if it does not exist.

        Args:
            name: the pool.
            streams: the streams to divert.
            capture: True for a graph capture, False for torch.cuda.use_mem_pool.
            use_on_oom: as in torch.cuda.MemPool, for a new pool.
            no_split: as in torch.cuda.MemPool, for a new pool.
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
        """End the diversion to a pool; the pool and its memory stay."""
        self.diversions = [entry for entry in self.diversions if entry[0] != name]
        self._note_captures()

    def release(self, name: int) -> None:
        """Remove one user of the pool (a graph, a MemPool); without users its free memory can be released."""
        self.users[name] -= 1

    def for_stream(self, stream: int) -> PoolPair | None:
        """Return the pool that a stream's allocations are diverted to, or None."""
        for name, streams, _ in self.diversions:
            if streams is None or stream in streams:
                return self.pools[name]
        return None

    def releasable(self) -> list[PoolPair]:
        """Return the pools without users."""
        return [pair for name, pair in self.pools.items() if not self.users[name]]

    def forget_empty(self) -> None:
        """Remove the pools that have neither users nor memory."""
        for name, pair in list(self.pools.items()):
            if not self.users[name] and not any(pool.segments for pool in pair):
                del self.pools[name], self.users[name]

    def _note_captures(self) -> None:
        self.capturing = any(capture for *_, capture in self.diversions)

    def cached_bytes(self) -> int:
        """Return the bytes of the pools' free blocks."""
        return sum(pool.cached_bytes() for pair in self.pools.values() for pool in pair)
