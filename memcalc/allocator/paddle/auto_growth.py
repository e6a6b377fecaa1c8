"""Paddle's auto_growth strategy: chunks of the requested size, cached, split at the tail, not freed by default.

Source: paddle/phi/core/memory/allocation/auto_growth_best_fit_allocator.cc: AllocateImpl, FreeImpl, FreeIdleChunks;
stream_safe_cuda_allocator.cc: one allocator per stream; reuse waits for events of other streams.
"""

from __future__ import annotations

from memcalc.allocator.blocks import Block, FreeBlockSet
from memcalc.allocator.driver import Driver
from memcalc.allocator.paddle.base import PaddleAllocator
from memcalc.allocator.paddle.device import MIN_CHUNK
from memcalc.allocator.paddle.settings import PaddleSettings
from memcalc.allocator.pools import Pool, PoolPair
from memcalc.allocator.sizes import multiple


class AutoGrowthAllocator(PaddleAllocator):
    """The allocator of one device.

    Args:
        settings: the flags.
        driver: the device; None for a device that never runs out of memory.
    """

    def __init__(self, settings: PaddleSettings | None = None, driver: Driver | None = None) -> None:
        settings = settings or PaddleSettings()
        super().__init__(settings, driver or Driver())
        small, large = self.counters.small, self.counters.large
        self._pair = PoolPair(Pool(small, small=True, by_address=True), Pool(large, small=False, by_address=True))
        self.pools = self._pair
        for pool, size in zip(self.pools, (settings.small_pre_alloc, settings.large_pre_alloc), strict=True):
            if size:
                free_set = pool.free_set_of(0)
                free_set.add(self._fetch(free_set, size))

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Allocate the tail of the smallest free block that is large enough; of equal blocks, the lowest address.

        Raises:
            OutOfMemory: with Paddle's message.
        """
        if self.uses.waiting:
            self.uses.process()
        rounded = multiple(size, MIN_CHUNK)
        pool = self._pair.small if rounded <= self.settings.small_pool else self._pair.large
        free_set = pool.free_set_of(stream)
        block = free_set.take(rounded) or self._grow(free_set, rounded)
        if block.size > rounded:
            block = self._split_tail(block, rounded)
        else:
            self._take_whole(block)
        self._hand_out(block, size)
        return block

    def _grow(self, free_set: FreeBlockSet, size: int) -> Block:
        """Allocate a chunk and return it as one block, in no set."""
        settings = self.settings
        if settings.free_when_no_cache_hit:
            self._free_idle_chunks()
        least = settings.chunk
        if settings.small_pool:
            least = settings.small_chunk if free_set.pool.small else settings.large_chunk
        chunk = max(size, least, MIN_CHUNK)
        block = self.memory.allocate_segment(free_set, chunk)
        if block is None:
            self._free_idle_chunks()
            block = self._fetch(free_set, chunk)
        return block

    def _free(self, block: Block) -> None:
        super()._free(block)
        if self.settings.free_idle_chunk:
            self._free_idle_chunks()
