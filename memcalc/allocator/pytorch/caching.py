"""The PyTorch caching allocator: requests in, blocks out, with all counters of PyTorch.

Source: torch c10/cuda/CUDACachingAllocator.cpp, class DeviceCachingAllocator: malloc, alloc_block, alloc_found_block,
free, free_block. docs/reference/allocators.md lists differences between versions and what is not modelled.

`malloc` and `free` run once per event of a stream, hundreds of thousands of times. They are inlined where calls would
cost more than their work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from memcalc.allocator.base import BlockAllocator
from memcalc.allocator.blocks import IN_USE, SIZE_SHIFT, Block, FreeBlockSet
from memcalc.allocator.counters import Counters
from memcalc.allocator.driver import Driver
from memcalc.allocator.pools import Pool, PoolPair
from memcalc.allocator.pytorch.best_fit import best_fit, splits
from memcalc.allocator.pytorch.constants import LARGEST_REQUEST, MIN_BLOCK, SMALL_REQUEST
from memcalc.allocator.pytorch.expandable import grow
from memcalc.allocator.pytorch.memory import LimitedMemory
from memcalc.allocator.pytorch.messages import (
    BEYOND_AN_EXABYTE,
    DeviceProcess,
    OutOfMemoryFigures,
    out_of_memory,
    rejected,
)
from memcalc.allocator.pytorch.private_pools import PrivatePools
from memcalc.allocator.pytorch.reclaim import collect_garbage, release_oversize, release_pools
from memcalc.allocator.pytorch.rounding import block_size, segment_size
from memcalc.allocator.pytorch.settings import Settings
from memcalc.allocator.pytorch.statistics import memory_stats
from memcalc.allocator.pytorch.versions import DEFAULT_VERSION, Version, parse_version
from memcalc.allocator.sizes import UNLIMITED
from memcalc.allocator.snapshot import views
from memcalc.allocator.views import SegmentView
from memcalc.errors import OutOfMemory

_UP, _BLOCKS = MIN_BLOCK - 1, -MIN_BLOCK  # (n + 511) & -512 is n rounded up to whole blocks


class CachingAllocator(BlockAllocator):
    """The allocator of one device.

    Args:
        settings: PYTORCH_CUDA_ALLOC_CONF as parsed for this version.
        version: the PyTorch version.
        driver: the device; None for a device that never runs out of memory.
        device: index of the device, for messages.
        processes: the processes that NVML would list, for messages.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        version: Version | None = None,
        driver: Driver | None = None,
        device: int = 0,
        processes: Sequence[DeviceProcess] = (),
    ) -> None:
        self.version = version or parse_version(DEFAULT_VERSION)
        settings = settings or Settings()
        counters = Counters(counts_rejections=self.version.counts_rejections)
        self.memory = LimitedMemory(driver or Driver(), settings, self.version, counters)
        super().__init__(self.memory)
        by_address = self.version.tie_break != "block"
        self.default = PoolPair(
            Pool(counters.small, small=True, by_address=by_address),
            Pool(counters.large, small=False, by_address=by_address),
        )
        self.private = PrivatePools(counters, self.version)
        self._device = device
        self._processes = processes
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Apply new settings, as torch.cuda.memory._set_allocator_settings does in a running program."""
        self.settings = settings
        self.memory.configure(settings)
        self.counters.max_split_size = settings.max_split_size
        self._collects = self.memory.limit is not None and settings.garbage_collection_threshold > 0
        # Whether requests are rounded to whole blocks only, and the smallest block that is large enough can be used
        # without further checks.
        self._plain = (
            settings.roundup_power2_divisions is None
            and settings.max_split_size == UNLIMITED
            and not settings.expandable_segments
            and not self._collects
            and not any(view.is_expandable for view in self.segments())
        )

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Allocate a block for `size` bytes, at least 1.

        Raises:
            OutOfMemory: with PyTorch's message, if the device has not enough free memory even after the cache is
                emptied.
        """
        diverted = self.private.diversions
        if self.uses.waiting and not self.private.capturing:
            self.uses.process()
        plain = self._plain
        rounded = (size + _UP) & _BLOCKS if plain else block_size(size, self.settings.roundup_power2_divisions)
        pair = (self.private.for_stream(stream) or self.default) if diverted else self.default
        pool = pair.small if rounded <= SMALL_REQUEST else pair.large
        free_set = pool.free_sets.get(stream) or pool.free_set_of(stream)

        block: Block | None
        if plain:
            keys = free_set.keys
            at = bisect_left(keys, rounded << SIZE_SHIFT)
            block = free_set.blocks.pop(keys.pop(at)) if at < len(keys) else None
        else:
            pool.searches += 1
            block = best_fit(free_set, rounded, self.settings)
        if block is None:
            block = self._fetch(free_set, rounded, size)

        rest = block.size - rounded
        if rest and splits(pool, rounded, rest, self.settings):
            block = self._split_front(block, rounded)
        elif block.previous is not None or block.next is not None:
            self._take_whole(block)
        block.state = IN_USE
        block.requested = size
        self.counters.count_allocated(pool.tally, block.size, size)
        return block

    @property
    def is_capturing(self) -> bool:
        """Whether a capture is active, during which the cache must not be emptied."""
        return self.private.capturing

    def empty_cache(self) -> None:
        """Wait for all streams and free cached memory to the driver, as torch.cuda.empty_cache().

        During a capture it does nothing. Source: release_cached_blocks.
        """
        if self.private.capturing:
            return
        self.counters.num_sync_all_streams += 1
        self.uses.synchronize()
        release_pools(self.memory, (self.default.large, self.default.small))
        for pair in self.private.releasable():
            release_pools(self.memory, pair)
        self.private.forget_empty()

    def statistics(self) -> dict[str, int]:
        """Return the figures of torch.cuda.memory_stats, under its names."""
        return memory_stats(self.counters)

    def segments(self) -> tuple[SegmentView, ...]:
        """Return the segments sorted by address, as torch.cuda.memory_snapshot lists them."""
        named = [(0, self.default), *self.private.pools.items()]
        return views((name, segment) for name, pair in named for pool in pair for segment in pool.segments)

    def _fetch(self, free_set: FreeBlockSet, size: int, requested: int) -> Block:
        """Get a block of at least `size` bytes, in no set, releasing cached memory if necessary. Source: malloc."""
        if requested >= LARGEST_REQUEST:
            raise OutOfMemory(BEYOND_AN_EXABYTE)
        if self._collects:
            collect_garbage(self.memory, self.default.large)
        segment = segment_size(size, self.settings.large_segment_size)
        block = self._from_driver(free_set, size, segment, requested)
        if block is None and self.version.lends_before_flush:
            block = self._from_lenders(free_set, size)
        if block is None and release_oversize(self.memory, free_set, size):
            block = self._from_driver(free_set, size, segment, requested)
        if block is None and not self.private.capturing:
            self.empty_cache()
            self.counters.num_alloc_retries += 1
            block = self._from_driver(free_set, size, segment, requested)
        if block is None and not self.version.lends_before_flush:
            block = self._from_lenders(free_set, size)
        if block is None:
            self.counters.num_ooms += 1
            raise OutOfMemory(out_of_memory(self._shortage(segment), self.version))
        return block

    def _from_driver(self, free_set: FreeBlockSet, size: int, segment: int, requested: int) -> Block | None:
        """Allocate new memory within the limit. Source: alloc_block."""
        memory = self.memory
        if not memory.within_limit(segment):
            return None
        if memory.rejects(segment):
            self.counters.num_oom_rejections += 1
            raise OutOfMemory(rejected(requested))
        if self.settings.expandable_segments:
            return grow(memory, free_set, size)
        return memory.allocate_segment(free_set, segment)

    def _from_lenders(self, free_set: FreeBlockSet, size: int) -> Block | None:
        """Return a free block of a memory pool with use_on_oom, or None."""
        for pair in self.private.pools.values():
            if pair.use_on_oom:
                pool = pair.small if free_set.pool.small else pair.large
                block = best_fit(pool.free_set_of(free_set.stream), size, self.settings)
                if block is not None:
                    return block
        return None

    def _shortage(self, segment: int) -> OutOfMemoryFigures:
        """Return the figures of the out-of-memory message."""
        driver, counters = self.memory.driver, self.counters
        return OutOfMemoryFigures(
            segment=segment,
            capacity=driver.capacity,
            free=driver.free_bytes,
            allocated=counters.allocated_bytes,
            reserved=counters.reserved_bytes,
            private=self.private.cached_bytes(),
            allowed=self.memory.limit,
            device=self._device,
            processes=self._processes,
        )
