"""Paddle's naive_best_fit strategy: one large chunk up front, and best fit inside it.

Source: paddle/fluid/memory/detail/buddy_allocator.cc: Alloc, RefillPool, SystemAlloc, SplitToAlloc, Free;
memory_block.h: the descriptor.
"""

from __future__ import annotations

from memcalc.allocator.base import BlockAllocator
from memcalc.allocator.blocks import FREE, Block
from memcalc.allocator.driver import Driver
from memcalc.allocator.paddle.device import MIN_CHUNK, PaddleMemory
from memcalc.allocator.paddle.messages import out_of_memory
from memcalc.allocator.paddle.settings import NAIVE_BEST_FIT, Settings
from memcalc.allocator.policy import SegmentView
from memcalc.allocator.pools import Pool
from memcalc.allocator.sizes import multiple
from memcalc.allocator.snapshot import views
from memcalc.errors import OutOfMemory

DESCRIPTOR = 64  # sizeof(MemoryBlock::Desc): kept on the host for GPU memory, but charged all the same


class NaiveBestFitAllocator(BlockAllocator):
    """The allocator of one device.

    Args:
        settings: the flags.
        driver: the device, whose capacity the first chunk is a share of.
    """

    def __init__(self, settings: Settings | None = None, driver: Driver | None = None) -> None:
        self.settings = settings or Settings(strategy=NAIVE_BEST_FIT)
        self.memory = PaddleMemory(driver or Driver(), self.settings)
        super().__init__(self.memory)
        self._pool = Pool(self.counters.large, small=False, by_address=True)
        self._shelf = self._pool.shelf(0)  # one for all streams
        self.max_chunk = max(self.memory.share(self.settings.initial), self.memory.share(self.settings.reallocate))
        self._huge: set[Block] = set()

    def malloc(self, size: int, stream: int = 0) -> Block:  # noqa: ARG002 - one pool for all streams
        """The front of the smallest free block that is large enough; what no chunk could hold is fetched by itself.

        Raises:
            OutOfMemory: with Paddle's text.
        """
        if self.uses.waiting:
            self.uses.process()
        rounded = multiple(size + DESCRIPTOR, MIN_CHUNK)
        if rounded > self.max_chunk:
            block = self._fetch(rounded)
            self._huge.add(block)
        else:
            block = self._shelf.take(rounded) or self._refill(rounded)
            if block.size > rounded:
                block = self._split_front(block, rounded)
            else:
                self._take_whole(block)
        self._hand_out(block, size)
        return block

    def empty_cache(self) -> None:
        """Release(): chunks without any block in use go back to the driver."""
        self.uses.synchronize()
        for block in self._pool.free_blocks():
            if block.previous is None and block.next is None:
                self.memory.give_back(block)

    def statistics(self) -> dict[str, int]:
        """Under the names of paddle.device.cuda."""
        return self.memory.statistics()

    def segments(self) -> tuple[SegmentView, ...]:
        """The chunks, by address."""
        return views((0, chunk) for chunk in self._pool.segments)

    def _refill(self, size: int) -> Block:
        """A new chunk as one block, in no set."""
        first = len(self._pool.segments) == len(self._huge)
        fixed = self.settings.initial if first else self.settings.reallocate
        return self._fetch(max(self.memory.share(fixed), size))

    def _fetch(self, size: int) -> Block:
        block = self.memory.fetch(self._shelf, size)
        if block is None:
            self.counters.num_ooms += 1
            raise OutOfMemory(out_of_memory(size, self.memory.driver, self.settings.limit))
        return block

    def _free(self, block: Block) -> None:
        if block not in self._huge:
            super()._free(block)
            return
        self._huge.remove(block)
        block.shelf.pool.tally.requested_now -= block.requested
        block.state = FREE
        self.memory.drop(block)
