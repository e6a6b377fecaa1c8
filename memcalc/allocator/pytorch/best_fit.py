"""Selection and splitting of the free block that serves a request.

Source: torch c10/cuda/CUDACachingAllocator.cpp: get_free_block, should_split.
"""

from __future__ import annotations

from memcalc.allocator.blocks import Block, FreeBlockSet
from memcalc.allocator.pools import Pool
from memcalc.allocator.pytorch.constants import MIN_BLOCK, UNSPLIT_REST
from memcalc.allocator.pytorch.expandable import expanded_size
from memcalc.allocator.pytorch.settings import Settings


def best_fit(free_set: FreeBlockSet, size: int, settings: Settings) -> Block | None:
    """Return the smallest free block of at least `size` bytes, removed from its set, or None.

    Only one candidate is checked: if its size is not allowed for this request, the result is None.
    """
    at = free_set.at_least(size)
    if at == len(free_set.keys):
        return None
    block: Block | None = free_set.blocks[free_set.keys[at]]
    assert block is not None
    if block.segment.page:
        block = _least_expandable(free_set, at) if settings.expandable_segments else _not_expandable(free_set, at)
        if block is None:
            return None
    if size < settings.max_split_size:
        if block.size >= settings.max_split_size:
            return None  # an oversize block serves oversize requests only
    elif block.size >= size + settings.max_non_split_rounding:
        return None  # and not a request that is much smaller than the block
    free_set.remove(block)
    return block


def splits(pool: Pool, size: int, rest: int, settings: Settings) -> bool:
    """Return whether the `rest` of a block beyond the `size` bytes needed is split off as a new block."""
    if not pool.splits:
        return False
    if pool.small or settings.expandable_segments:
        return rest >= MIN_BLOCK
    return rest > UNSPLIT_REST and size < settings.max_split_size


def _least_expandable(free_set: FreeBlockSet, at: int) -> Block:
    """Return the first block from position `at` on with a successor that cannot grow to less than it can.

    A block at the growing end counts with the size that it can grow to, so that gaps are filled first.
    """
    keys, blocks = free_set.keys, free_set.blocks
    block = blocks[keys[at]]
    while block.segment.page and at + 1 < len(keys):
        at += 1
        following = blocks[keys[at]]
        if expanded_size(following) >= expanded_size(block):
            break
        block = following
    return block


def _not_expandable(free_set: FreeBlockSet, at: int) -> Block | None:
    """Return the first block of a non-expandable segment from `at` on: the option was switched off mid-run."""
    return next((block for key in free_set.keys[at:] if not (block := free_set.blocks[key]).segment.page), None)
