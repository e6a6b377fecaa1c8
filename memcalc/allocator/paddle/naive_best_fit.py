"""Paddle's naive_best_fit strategy: one large chunk at the start, and best fit inside it.

Source: paddle/fluid/memory/detail/buddy_allocator.cc: Alloc, RefillPool, SystemAlloc, SplitToAlloc, Free;
memory_block.h: the descriptor.
"""

from __future__ import annotations

from memcalc.allocator.blocks import FREE, Block
from memcalc.allocator.driver import Driver
from memcalc.allocator.paddle.base import PaddleAllocator
from memcalc.allocator.paddle.device import MIN_CHUNK
from memcalc.allocator.paddle.settings import NAIVE_BEST_FIT, PaddleSettings
from memcalc.allocator.pools import Pool
from memcalc.allocator.sizes import multiple

DESCRIPTOR = 64  # sizeof(MemoryBlock::Desc): for GPU memory it is stored on the host, but still added to the block


class NaiveBestFitAllocator(PaddleAllocator):
    """The allocator of one device.

    Args:
        settings: the flags.
        driver: the device; the first chunk is a fraction of its capacity.
    """

    def __init__(self, settings: PaddleSettings | None = None, driver: Driver | None = None) -> None:
        super().__init__(settings or PaddleSettings(strategy=NAIVE_BEST_FIT), driver or Driver())
        self._pool = Pool(self.counters.large, small=False, by_address=True)
        self._free_set = self._pool.free_set_of(0)  # shared by all streams
        self.pools = (self._pool,)
        self.max_chunk = max(
            self.memory.chunk_bytes(self.settings.initial), self.memory.chunk_bytes(self.settings.reallocate)
        )
        self._huge: set[Block] = set()

    def malloc(self, size: int, stream: int = 0) -> Block:  # noqa: ARG002 - one pool for all streams
        """Allocate the front of the smallest sufficient free block; a request above `max_chunk` gets its own chunk.

        Raises:
            OutOfMemory: with Paddle's message.
        """
        if self.uses.waiting:
            self.uses.process()
        rounded = multiple(size + DESCRIPTOR, MIN_CHUNK)
        if rounded > self.max_chunk:
            block = self._fetch(self._free_set, rounded)
            self._huge.add(block)
        else:
            block = self._free_set.take(rounded) or self._refill(rounded)
            if block.size > rounded:
                block = self._split_front(block, rounded)
            else:
                self._take_whole(block)
        self._hand_out(block, size)
        return block

    def _refill(self, size: int) -> Block:
        """Allocate a chunk and return it as one block, in no set."""
        first = len(self._pool.segments) == len(self._huge)
        fixed = self.settings.initial if first else self.settings.reallocate
        return self._fetch(self._free_set, max(self.memory.chunk_bytes(fixed), size))

    def _free(self, block: Block) -> None:
        if block not in self._huge:
            super()._free(block)
            return
        self._huge.remove(block)
        block.free_set.pool.tally.requested_now -= block.requested
        block.state = FREE
        self.memory.drop(block)
