"""Pinned host memory, which PyTorch allocates in blocks of a power of two.

torch 2.13 ATen/core/CachingHostAllocator.h, CachingHostAllocatorImpl.allocate (pinned_max_round_threshold_mb is
unlimited by default). Freed memory stays with the process.
"""

from __future__ import annotations

SOURCE = "torch 2.13 ATen/core/CachingHostAllocator.h: PowerOf2Ceil"


def pinned_block(size: int) -> int:
    """Return the bytes of the block for a request: 5 MiB need 8 MiB."""
    return 1 << (size - 1).bit_length() if size > 0 else 0
