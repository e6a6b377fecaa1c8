"""How tensors lie in their storages."""

from __future__ import annotations

from collections.abc import Sequence


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements lie side by side, in whatever order of the axes, each once."""
    extent = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != extent:
            return False
        extent *= size
    return True


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
