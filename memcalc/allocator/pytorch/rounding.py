"""Rounding: from requested bytes to the size of a block, and to the size of a new segment for it.

Source: torch c10/cuda/CUDACachingAllocator.cpp: round_size, roundup_power2_next_division, get_allocation_size.
"""

from __future__ import annotations

from memcalc.allocator.pytorch.constants import (
    LARGE_SEGMENT,
    MADE_TO_MEASURE,
    MIN_BLOCK,
    ROUNDUP_SLOTS,
    SEGMENT_STEP,
    SMALL_REQUEST,
    SMALL_SEGMENT,
)
from memcalc.allocator.sizes import MIB, multiple


def slot(size: int) -> int:
    """Return the roundup_power2_divisions slot of a size: 0 below 2 MiB, 8 in [256, 512) MiB, 15 from 32 GiB on."""
    return min(max(size.bit_length() - MIB.bit_length(), 0), ROUNDUP_SLOTS - 1)


def next_division(size: int, divisions: int) -> int:
    """Return `size` rounded up to one of `divisions` (a power of two) equal steps between two powers of two."""
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor // divisions
    return multiple(size, step) if step else 2 * floor


def block_size(size: int, divisions: tuple[int, ...] | None = None) -> int:
    """Return the bytes of the block for a request of `size` bytes.

    Args:
        size: bytes requested, at least 1.
        divisions: the 16 slots of roundup_power2_divisions; None if the option is off.
    """
    if divisions is not None and size >= MIN_BLOCK:
        steps = divisions[slot(size)]
        if steps > 1 and size > MIN_BLOCK * steps:
            return next_division(size, steps)
    return multiple(size, MIN_BLOCK)


def segment_size(block: int, large_segment: int = LARGE_SEGMENT) -> int:
    """Return the bytes requested from the driver if no cached block fits a block of `block` bytes."""
    if block <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if block < MADE_TO_MEASURE:
        return large_segment
    return multiple(block, SEGMENT_STEP)
