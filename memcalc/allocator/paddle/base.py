"""What Paddle's strategies do alike: fetch within the limit, fail in Paddle's words, give back idle chunks."""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.allocator.base import BlockAllocator
from memcalc.allocator.blocks import Block, Shelf
from memcalc.allocator.driver import Driver
from memcalc.allocator.paddle.device import PaddleMemory
from memcalc.allocator.paddle.messages import out_of_memory
from memcalc.allocator.paddle.settings import Settings
from memcalc.allocator.policy import SegmentView
from memcalc.allocator.pools import Pool
from memcalc.allocator.snapshot import views
from memcalc.errors import OutOfMemory


class PaddleAllocator(BlockAllocator):
    """An allocator of one device with pools of chunks.

    Args:
        settings: the flags.
        driver: the device.
    """

    pools: Iterable[Pool]  # every subclass makes its own

    def __init__(self, settings: Settings, driver: Driver) -> None:
        self.settings = settings
        self.memory = PaddleMemory(driver, settings)
        super().__init__(self.memory)

    def empty_cache(self) -> None:
        """paddle.device.cuda.empty_cache(), Release(): chunks without any block in use go back to the driver."""
        self.uses.synchronize()
        self._free_idle_chunks()

    def statistics(self) -> dict[str, int]:
        """Under the names of paddle.device.cuda."""
        return self.memory.statistics()

    def segments(self) -> tuple[SegmentView, ...]:
        """The chunks, by address."""
        return views((0, chunk) for pool in self.pools for chunk in pool.segments)

    def _fetch(self, shelf: Shelf, size: int) -> Block:
        """A new chunk as one block, in no set.

        Raises:
            OutOfMemory: with Paddle's text.
        """
        block = self.memory.fetch(shelf, size)
        if block is None:
            self.counters.num_ooms += 1
            raise OutOfMemory(out_of_memory(size, self.memory.driver, self.settings.limit))
        return block

    def _free_idle_chunks(self) -> None:
        for pool in self.pools:
            for block in pool.idle_blocks():
                self.memory.give_back(block)
