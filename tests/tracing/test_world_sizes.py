"""FSDP2 at world sizes from 1 to 1,024, as recorded on fake tensors: two whole models, beside the estimate."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tools.world_sizes import Sized, sizes

SIZES = tuple(sizes())
IDS = [f"{size.preset}-{size.ranks}" for size in SIZES]


def test_both_models_at_every_size() -> None:
    assert [(size.preset, size.ranks) for size in SIZES] == [
        (preset, ranks) for preset in ("llama-3-8b", "llama-3-70b") for ranks in (1, 2, 8, 64, 256, 1024)
    ]


@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_a_ranks_states_are_the_estimates_and_sum_to_the_whole(size: Sized) -> None:
    """To the byte; rows that are no multiple of the ranks, and small blocks, fill up less than a part in a thousand."""
    assert size.states[0] == size.states[1]
    assert 0 <= size.filled < 1e-3


@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_the_peak_is_explained_row_by_row(size: Sized) -> None:
    """What stays, what is saved and what is gathered: each row within a part in a thousand of the peak."""
    traced, estimated = size.peak

    assert estimated == pytest.approx(traced, rel=1e-3)
    for name, (held, said) in size.at_peak.items():
        assert said == pytest.approx(held, abs=traced / 1000), name


def test_more_ranks_hold_less() -> None:
    for one, other in pairwise(SIZES):
        if one.preset == other.preset:
            assert other.states[0] < one.states[0]
            assert other.peak[0] < one.peak[0]
