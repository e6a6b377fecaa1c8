"""Sorting and scatter-adding: CUB's radix sort needs a second copy of keys and values.

ATen native/cuda/Sort.cu, Indexing.cu and cub's DeviceRadixSort (one sweep per pass). The sizes are those that torch
2.13 with CUDA 13 requests: 55,295 bytes for 3,073 pairs of int64 with 16 differing bits and 1,071,615 for 65,536 of
them on capability 8.0, 1,068,543 on 9.0, 151,039 for 8,192 pairs with 64 bits.
"""

from __future__ import annotations

from memcalc.workspaces import Script, ceil_div, round_up

INDEX = 8  # bytes of int64

# Pairs that a thread block sorts at once, by compute capability, derived from the scratch of eight lengths each.
TILES = {9: 4608, 8: 3840, 7: 2816}
DIGITS = 256  # of the eight bits that one pass sorts by
ALIGNMENT = 511
ONE_BLOCK = 3072  # pairs that a single thread block sorts without scratch (CUB then requests a single byte)
SMALL_ROW = 4096  # elements of a row that are sorted in shared memory (Sort.cpp, should_use_small_sort)


def sort_scratch(count: int, key_bytes: int, bits: int, major: int) -> int:
    """Return the bytes of CUB's scratch for sorting keys with int64 values.

    Args:
        count: number of pairs.
        key_bytes: of a key.
        bits: number of differing key bits.
        major: compute capability.
    """
    if count <= ONE_BLOCK:
        return 1
    keys, values = round_up(key_bytes * count, 256), round_up(INDEX * count, 256)  # second copies of both
    bins = 8 * DIGITS * ceil_div(bits, 8)  # of each pass
    lookback = 4 * DIGITS * ceil_div(count, TILES[min(max(major, 7), 9)])
    return keys + values + bins + lookback + ALIGNMENT


def sort(rows: int, length: int, key_bytes: int, major: int) -> Script:
    """Return the script after the sorted values and their positions; several long rows are not modelled (empty)."""
    indices = INDEX * length
    if length <= SMALL_ROW:
        return (indices, -indices)
    if rows > 1:
        return ()
    scratch = sort_scratch(length, key_bytes, 8 * key_bytes, major)
    return (indices, scratch, -scratch, -indices)


def scatter_add(indices: int, rows: int, major: int, *, checked: bool) -> Script:
    """Return the script of index_put with accumulation, after its output.

    Args:
        indices: number of indices.
        rows: number of rows they select from.
        major: compute capability.
        checked: whether the indices are range-checked; not in the backward of reading rows by an index.
    """
    size, scratch = INDEX * indices, sort_scratch(indices, INDEX, rows.bit_length(), major)
    range_check = (INDEX, INDEX, 1, -1, 1, -1, -INDEX, -INDEX)  # the smallest and the largest index
    sorted_indices = (size, size, -size, size, size, size, scratch, -scratch)
    return (*(range_check if checked else ()), *sorted_indices, -size, -size, -size, -size)


FEW = 3072  # indices that are added without sorting
SEARCH_SCRATCH = 1279  # CUB's select and scan: 1,279 to 2,047 bytes for 3,073 to 65,536 indices (torch 2.13, CUDA 13)


def before_gradient(indices: int, rows: int, major: int) -> Script:
    """Return the script before an embedding's gradient: sorted indices, their original positions, CUB's scratch.

    More than 3072 indices are sorted, and gradients of one row are summed by segments (ATen native/cuda/Embedding.cu,
    EmbeddingBackwardKernel.cu). CUB's scratch depends on the CUDA version and the architecture.
    """
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
