"""The common part of Paddle's strategies: allocate chunks within the limit, raise Paddle's errors, free idle chunks."""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.allocator.base import BlockAllocator
from memcalc.allocator.blocks import Block, FreeBlockSet
from memcalc.allocator.driver import Driver
from memcalc.allocator.paddle.device import PaddleMemory
from memcalc.allocator.paddle.settings import PaddleSettings
from memcalc.allocator.pools import Pool
from memcalc.allocator.sizes import MIB
from memcalc.allocator.snapshot import views
from memcalc.allocator.views import SegmentView
from memcalc.errors import OutOfMemory


class PaddleAllocator(BlockAllocator):
    """An allocator of one device with pools of chunks."""

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


# Paddle's out-of-memory message. Source: paddle cuda_allocator.cc, naive_best_fit_allocator.cc.


def readable(size: int) -> str:
    """Return bytes as Paddle prints them: 1.500000GB, in powers of 1024."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:f}{units[0]}"


def out_of_memory(size: int, driver: Driver, limit: int, device: int = 0) -> str:
    """Return the message of ResourceExhaustedError, which has several lines.

    Args:
        size: bytes requested from the driver.
        driver: the device.
        limit: FLAGS_gpu_memory_limit_mb in bytes; 0 for none.
        device: index of the device.
    """
    used = driver.capacity - driver.free_bytes
    total = min(driver.capacity, limit) if limit else driver.capacity
    advice = (
        f"Or set environment variable `FLAGS_gpu_memory_limit_mb` to a larger value. Currently "
        f"`FLAGS_gpu_memory_limit_mb` is {limit // MIB}, so the maximum GPU memory usage is limited to {limit // MIB} "
        "MB.\n   The command is `export FLAGS_gpu_memory_limit_mb=xxx`."
        if limit
        else ""
    )
    return (
        f"\n\nOut of memory error on GPU {device}. Cannot allocate {readable(size)} memory on GPU {device}, "
        f"{readable(used)} memory has been allocated and available memory is only {readable(max(0, total - used))}.\n\n"
        f"Please check whether there is any other process using GPU {device}.\n"
        f"1. If yes, please stop them, or start PaddlePaddle on another GPU.\n"
        f"2. If no, please decrease the batch size of your model. {advice}\n"
    )
