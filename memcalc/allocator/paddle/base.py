"""The common part of Paddle's strategies: allocate chunks within the limit, raise Paddle's errors, free idle chunks."""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.allocator.base import BlockAllocator
from memcalc.allocator.blocks import Block, FreeBlockSet
from memcalc.allocator.driver import Driver
from memcalc.allocator.paddle.device import PaddleMemory
from memcalc.allocator.paddle.messages import out_of_memory
from memcalc.allocator.paddle.settings import PaddleSettings
from memcalc.allocator.pools import Pool
from memcalc.allocator.snapshot import views
from memcalc.allocator.views import SegmentView
from memcalc.errors import OutOfMemory


class PaddleAllocator(BlockAllocator):
    """An allocator of one device with pools of chunks.

    Args:
        settings: the flags.
        driver: the device.
    """

    pools: Iterable[Pool]  # set by every subclass

    def __init__(self, settings: PaddleSettings, driver: Driver) -> None:
        self.settings = settings
        self.memory = PaddleMemory(driver, settings)
        super().__init__(self.memory)

    def empty_cache(self) -> None:
        """Free chunks without blocks in use, as paddle.device.cuda.empty_cache() and Release()."""
        self.uses.synchronize()
        self._free_idle_chunks()

    def statistics(self) -> dict[str, int]:
        """Return the counters, under the names of paddle.device.cuda."""
        return self.memory.statistics()

    def segments(self) -> tuple[SegmentView, ...]:
        """Return the chunks, sorted by address."""
        return views((0, chunk) for pool in self.pools for chunk in pool.segments)

    def _fetch(self, free_set: FreeBlockSet, size: int) -> Block:
        """Allocate a chunk and return it as one block, in no set.

        Raises:
            OutOfMemory: with Paddle's message.
        """
        block = self.memory.allocate_segment(free_set, size)
        if block is None:
            self.counters.num_ooms += 1
            raise OutOfMemory(out_of_memory(size, self.memory.driver, self.settings.limit))
        return block

    def _free_idle_chunks(self) -> None:
        for pool in self.pools:
            for block in pool.idle_blocks():
                self.memory.free_segments(block)
