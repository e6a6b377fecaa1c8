"""The tables of FSDP2's copy kernels, as runs on the null device took them."""

from __future__ import annotations

from memcalc.workspaces.multiprocessors import Multiprocessors
from memcalc.workspaces.sharding import chunk_cat, split_copy

H100 = Multiprocessors(132, 2048, 9)


def test_tables_have_a_number_for_each_parameter_and_each_block() -> None:
    """Three parameters of 1, 2 and 5 tiles of 2,048 bytes: 8 blocks of threads."""
    parts = (2048, 4096, 9000)

    assert split_copy(parts, 2, H100) == (8 * (3 * 3 + 8 + 4), -8 * (3 * 3 + 8 + 4))
    assert chunk_cat(parts) == (8 * (4 * 3 + 2 * 4 + 8), -8 * (4 * 3 + 2 * 4 + 8))


def test_large_copies_are_shared_out_over_the_gpu() -> None:
    """132 · 2048 / 128 · 2 = 4,224 blocks at once: 16,896 of them take four rounds, two of them on other ranks' parts."""
    tiles = 16896 // 8
    numbers = 3 + tiles // 2 + 2

    assert split_copy((2048 * tiles,), 8, H100) == (8 * numbers, -8 * numbers)
