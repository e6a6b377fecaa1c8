"""Release of cached memory to the driver: all of it, just enough, or the oldest blocks.

Source: torch c10/cuda/CUDACachingAllocator.cpp: release_cached_blocks, release_available_cached_blocks,
garbage_collect_cached_blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.allocator.blocks import Block, FreeBlockSet
from memcalc.allocator.pools import Pool
from memcalc.allocator.pytorch.expandable import unmap
from memcalc.allocator.pytorch.memory import LimitedMemory
from memcalc.allocator.sizes import UNLIMITED


def is_split(block: Block) -> bool:
    """Return whether a block shares its segment with others; such a segment is never released."""
    return block.previous is not None or block.next is not None


def release_pools(memory: LimitedMemory, pools: Iterable[Pool]) -> None:
    """Release the free blocks that fill a segment, and the whole pages in free blocks of expandable segments."""
    for pool in pools:
        free = pool.free_blocks()
        for block in free:
            if not block.segment.page and not is_split(block):
                memory.free_segments(block)
        for block in free:
            if block.segment.page:
                unmap(memory, block)


def release_oversize(memory: LimitedMemory, free_set: FreeBlockSet, size: int) -> bool:
    """Release the smallest oversize block that could serve the request, or the largest ones until they suffice.

    Blocks of expandable segments and of split ones cannot be released and do not count.

    Returns:
        whether enough was released; blocks stay released in any case.
    """
    largest_split = memory.settings.max_split_size
    if largest_split == UNLIMITED:
        return False
    needed = max(size, largest_split)
    at = free_set.at_least(needed)
    if at < len(free_set.keys):
        block = free_set.blocks[free_set.keys[at]]
        if block.segment.page or is_split(block):
            return False
        memory.free_segments(block)
        return True
    released = 0
    for key in reversed(free_set.keys[:at]):
        block = free_set.blocks[key]
        if released >= needed or block.size < largest_split:
            break
        if not block.segment.page and not is_split(block):
            released += block.size
            memory.free_segments(block)
    return released >= needed


def collect_garbage(memory: LimitedMemory, pool: Pool) -> None:
    """Release free segments of at least average age, until reserved memory is below the threshold or none is left.

    A block's age is the number of searches in its pool since it was freed. A round is finished even if it releases more
    than needed.
    """
    assert memory.limit is not None
    threshold = int(memory.settings.garbage_collection_threshold * memory.limit)
    excess = memory.reserved - threshold
    candidates = [block for block in pool.free_blocks() if not is_split(block) and not block.segment.page]
    released = 0
    while candidates and released < excess:
        average = sum(pool.searches - block.since for block in candidates) / len(candidates)
        young = []
        for block in candidates:
            if pool.searches - block.since < average:
                young.append(block)
            else:
                released += block.size
                memory.free_segments(block)
        candidates = young
