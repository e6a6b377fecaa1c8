"""Sorting and scatter-adding: CUB's radix sort needs everything twice.

ATen native/cuda/Sort.cu, Indexing.cu and cub's DeviceRadixSort (one sweep a pass). The sizes are those that torch 2.13
with CUDA 13 asks for: 55,295 bytes for 3,073 pairs of int64 with 16 differing bits and 1,071,615 for 65,536 of them on
capability 8.0, 1,068,543 on 9.0, 151,039 for 8,192 pairs with 64 bits.
"""

from __future__ import annotations

from memcalc.workspaces import Script, ceil_div, round_up

INDEX = 8  # bytes of int64

# Pairs that a thread block sorts at once, by compute capability, from the scratch of eight lengths each.
TILES = {9: 4608, 8: 3840, 7: 2816}
DIGITS = 256  # of the eight bits that one pass sorts by
ALIGNMENT = 511
ONE_BLOCK = 3072  # pairs that one thread block sorts by itself, without scratch (CUB then asks for a single byte)
SMALL_ROW = 4096  # elements of a row that are sorted in shared memory (Sort.cpp, should_use_small_sort)


def sort_scratch(count: int, key_bytes: int, bits: int, major: int) -> int:
    """CUB's scratch for sorting keys with int64 values.

    Args:
        count: of pairs.
        key_bytes: of a key.
        bits: of the keys that differ.
        major: compute capability.
    """
    if count <= ONE_BLOCK:
        return 1
    keys, values = round_up(key_bytes * count, 256), round_up(INDEX * count, 256)  # once more each
    bins = 8 * DIGITS * ceil_div(bits, 8)  # of each pass
    lookback = 4 * DIGITS * ceil_div(count, TILES[min(max(major, 7), 9)])
    return keys + values + bins + lookback + ALIGNMENT


def sort(rows: int, length: int, key_bytes: int, major: int) -> Script:
    """After the sorted values and their positions; many long rows are not known."""
    indices = INDEX * length
    if length <= SMALL_ROW:
        return (indices, -indices)
    if rows > 1:
        return ()
    scratch = sort_scratch(length, key_bytes, 8 * key_bytes, major)
    return (indices, scratch, -scratch, -indices)


def scatter_add(indices: int, rows: int, major: int, *, checked: bool) -> Script:
    """index_put with accumulation, after its output.

    Args:
        indices: how many.
        rows: that they choose from.
        major: compute capability.
        checked: whether the indices are; not in the backward of reading rows by an index.
    """
    size, scratch = INDEX * indices, sort_scratch(indices, INDEX, rows.bit_length(), major)
    range_check = (INDEX, INDEX, 1, -1, 1, -1, -INDEX, -INDEX)  # the smallest and the largest index
    sorted_indices = (size, size, -size, size, size, size, scratch, -scratch)
    return (*(range_check if checked else ()), *sorted_indices, -size, -size, -size, -size)
