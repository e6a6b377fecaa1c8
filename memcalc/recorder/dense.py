"""Memory layout of tensors in their storages."""

from __future__ import annotations

from collections.abc import Sequence


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements are contiguous and non-overlapping under some order of the axes."""
    extent = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != extent:
            return False
        extent *= size
    return True


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
