"""Backward of the embedding: more than 3072 indices are sorted, and gradients of one row are summed by segments.

ATen native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu. CUB's scratch depends on the CUDA version and the
architecture.
"""

from __future__ import annotations

from memcalc.workspaces import Script
from memcalc.workspaces.sorting import INDEX, sort_scratch

FEW = 3072  # indices that are added without sorting
SEARCH_SCRATCH = 1279  # CUB's select and scan: 1,279 to 2,047 bytes for 3,073 to 65,536 indices (torch 2.13, CUDA 13)


def before_gradient(indices: int, rows: int, major: int) -> Script:
    """Return the script before the gradient itself: sorted indices, their original positions, CUB's scratch."""
    if indices <= FEW:
        return ()
    size, scratch = INDEX * indices, sort_scratch(indices, INDEX, rows.bit_length(), major)
    return (size, size, size, scratch, -scratch, -size)


def after_gradient(indices: int, rows: int, width: int) -> Script:
    """Return the script after the gradient: segment borders and partial sums in fp32; sorted indices are freed last."""
    if indices <= FEW:
        return ()
    size, distinct = INDEX * indices, min(indices, rows)
    segments = indices // 10 + distinct  # partial segments hold ten indices each
    borders, partial, offsets = INDEX * distinct, 4 * segments * width, INDEX * segments
    search = SEARCH_SCRATCH
    taken = (size, INDEX, size, search, -search, -size, borders, borders, search, -search, INDEX, offsets, partial)
    return (*taken, -partial, -offsets, -INDEX, -borders, -borders, -INDEX, -size, -size, -size)
