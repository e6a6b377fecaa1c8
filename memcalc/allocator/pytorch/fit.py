"""Which free block serves a request, and how much of it.

Source: torch c10/cuda/CUDACachingAllocator.cpp: get_free_block, should_split.
"""

from __future__ import annotations

from memcalc.allocator.blocks import Block, Shelf
from memcalc.allocator.pools import Pool
from memcalc.allocator.pytorch.constants import MIN_BLOCK, UNSPLIT_REST
from memcalc.allocator.pytorch.expandable import expanded_size
from memcalc.allocator.pytorch.settings import Settings


def best_fit(shelf: Shelf, size: int, settings: Settings) -> Block | None:
    """The smallest free block of at least `size` bytes, taken out of its set.

    Only one candidate is looked at: when it may not be broken up, there is none.
    """
    at = shelf.at_least(size)
    if at == len(shelf.keys):
        return None
    block: Block | None = shelf.blocks[shelf.keys[at]]
    assert block is not None
    if block.segment.page:
        block = _least_expandable(shelf, at) if settings.expandable_segments else _not_expandable(shelf, at)
        if block is None:
            return None
    if size < settings.max_split_size:
        if block.size >= settings.max_split_size:
            return None  # an oversize block is kept whole for an oversize request
    elif block.size >= size + settings.max_non_split_rounding:
        return None  # and one that is much too large for such a request, for a larger one
    shelf.remove(block)
    return block


def splits(pool: Pool, size: int, rest: int, settings: Settings) -> bool:
    """Whether the `rest` of a block beyond the `size` bytes needed becomes a block of its own."""
    if not pool.splits:
        return False
    if pool.small or settings.expandable_segments:
        return rest >= MIN_BLOCK
    return rest > UNSPLIT_REST and size < settings.max_split_size


def _least_expandable(shelf: Shelf, at: int) -> Block:
    """From a position on, the first block after which the next one could not grow to less.

    A block at the growing end counts with all that it could grow to, so that holes are filled first.
    """
    keys, blocks = shelf.keys, shelf.blocks
    block = blocks[keys[at]]
    while block.segment.page and at + 1 < len(keys):
        at += 1
        following = blocks[keys[at]]
        if expanded_size(following) >= expanded_size(block):
            break
        block = following
    return block


def _not_expandable(shelf: Shelf, at: int) -> Block | None:
    """From a position on, the first block of another segment: expandable ones were switched off in mid-run."""
    return next((block for key in shelf.keys[at:] if not (block := shelf.blocks[key]).segment.page), None)
