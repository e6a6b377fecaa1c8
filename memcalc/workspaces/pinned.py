"""Pinned memory of the host, which PyTorch hands out in blocks of a power of two.

torch 2.13 ATen/core/CachingHostAllocator.h, CachingHostAllocatorImpl.allocate (pinned_max_round_threshold_mb is without
bounds by default). What is given back stays with the process.
"""

from __future__ import annotations

SOURCE = "torch 2.13 ATen/core/CachingHostAllocator.h: PowerOf2Ceil"


def pinned_block(size: int) -> int:
    """Bytes of the block for so many bytes: 5 MiB take 8."""
    return 1 << (size - 1).bit_length() if size > 0 else 0
