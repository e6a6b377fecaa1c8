"""What PyTorch's caching allocator hands out for a request: the request rounded up, and tails too small to split off.

Source: torch 2.13 c10/cuda/CUDACachingAllocator.cpp: round_size, get_allocation_size and should_split.
"""

from __future__ import annotations

BLOCK = 512  # kMinBlockSize
MIB = 2**20
LARGE_REQUEST = 10 * MIB  # kMinLargeAlloc: from here on a segment is made to measure, in steps of 2 MiB
SEGMENT_STEP = 2 * MIB  # kRoundLarge
UNSPLIT_TAIL = MIB  # kSmallSize: a rest of up to 1 MiB is not split off a large block


def rounded(size: int) -> int:
    """A multiple of 512 bytes; nothing for nothing."""
    return (size + BLOCK - 1) // BLOCK * BLOCK


def block_bytes(size: int) -> int:
    """The block for a tensor that lives long, hence in a segment made for it: with the tail that is not split off."""
    block = rounded(size)
    if block < LARGE_REQUEST:
        return block
    segment = (block + SEGMENT_STEP - 1) // SEGMENT_STEP * SEGMENT_STEP
    return segment if segment - block <= UNSPLIT_TAIL else block
