"""Paddle's auto_growth strategy: chunks as large as they are needed, cached, split from behind, never returned.

Source: paddle/phi/core/memory/allocation/auto_growth_best_fit_allocator.cc: AllocateImpl, FreeImpl, FreeIdleChunks;
stream_safe_cuda_allocator.cc: one allocator for each stream, events of other streams awaited before reuse.
"""

from __future__ import annotations

from memcalc.allocator.base import BlockAllocator
from memcalc.allocator.blocks import Block, Shelf
from memcalc.allocator.driver import Driver
from memcalc.allocator.paddle.device import MIN_CHUNK, PaddleMemory
from memcalc.allocator.paddle.messages import out_of_memory
from memcalc.allocator.paddle.settings import Settings
from memcalc.allocator.policy import SegmentView
from memcalc.allocator.pools import Pool, PoolPair
from memcalc.allocator.sizes import multiple
from memcalc.allocator.snapshot import views
from memcalc.errors import OutOfMemory


class AutoGrowthAllocator(BlockAllocator):
    """The allocator of one device.

    Args:
        settings: the flags.
        driver: the device; without one, a device that never runs out.
    """

    def __init__(self, settings: Settings | None = None, driver: Driver | None = None) -> None:
        self.settings = settings = settings or Settings()
        self.memory = PaddleMemory(driver or Driver(), settings)
        super().__init__(self.memory)
        small, large = self.counters.small, self.counters.large
        self.pools = PoolPair(Pool(small, small=True, by_address=True), Pool(large, small=False, by_address=True))
        for pool, size in ((self.pools.small, settings.small_pre_alloc), (self.pools.large, settings.large_pre_alloc)):
            if size:
                self._reserve(pool.shelf(0), size)

    def malloc(self, size: int, stream: int = 0) -> Block:
        """The tail of the smallest free block that is large enough, at the lowest address of several.

        Raises:
            OutOfMemory: with Paddle's text.
        """
        if self.uses.waiting:
            self.uses.process()
        rounded = multiple(size, MIN_CHUNK)
        pool = self.pools.small if rounded <= self.settings.small_pool else self.pools.large
        shelf = pool.shelf(stream)
        block = shelf.take(rounded) or self._grow(shelf, rounded)
        if block.size > rounded:
            block = self._split_tail(block, rounded)
        else:
            self._take_whole(block)
        self._hand_out(block, size)
        return block

    def empty_cache(self) -> None:
        """paddle.device.cuda.empty_cache(): chunks without any block in use go back to the driver."""
        self.uses.synchronize()
        self._free_idle_chunks()

    def statistics(self) -> dict[str, int]:
        """Under the names of paddle.device.cuda."""
        return self.memory.statistics()

    def segments(self) -> tuple[SegmentView, ...]:
        """The chunks, by address."""
        return views((0, chunk) for pool in self.pools for chunk in pool.segments)

    def _grow(self, shelf: Shelf, size: int) -> Block:
        """A new chunk as one block, in no set."""
        settings = self.settings
        if settings.free_when_no_cache_hit:
            self._free_idle_chunks()
        least = settings.chunk
        if settings.small_pool:
            least = settings.small_chunk if shelf.pool.small else settings.large_chunk
        chunk = max(size, least, MIN_CHUNK)
        block = self.memory.fetch(shelf, chunk)
        if block is None:
            self._free_idle_chunks()
            block = self.memory.fetch(shelf, chunk)
        if block is None:
            self.counters.num_ooms += 1
            raise OutOfMemory(out_of_memory(chunk, self.memory.driver, settings.limit))
        return block

    def _reserve(self, shelf: Shelf, size: int) -> None:
        """A first chunk, free."""
        block = self.memory.fetch(shelf, size)
        if block is None:
            raise OutOfMemory(out_of_memory(size, self.memory.driver, self.settings.limit))
        shelf.add(block)

    def _free(self, block: Block) -> None:
        super()._free(block)
        if self.settings.free_idle_chunk:
            self._free_idle_chunks()

    def _free_idle_chunks(self) -> None:
        for pool in self.pools:
            for block in pool.free_blocks():
                if block.previous is None and block.next is None:
                    self.memory.give_back(block)
