"""Estimates against one rank of layers that PyTorch's DTensor splits, on the null CUDA device."""

from __future__ import annotations

from statistics import median

import pytest

from tools.sharded import ShardedRun
from tools.tensor_parallel import split_runs

RUNS = split_runs()

MEDIAN, WORST = 0.002, 0.01  # as required


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.case)
def test_each_peak(run: ShardedRun) -> None:
    """The remaining error is unsplit block remainders."""
    assert abs(run.error) <= WORST


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.case)
def test_the_phases_of_the_second_step(run: ShardedRun) -> None:
    """Loss and backward as near as the peak; the forward of runs that recompute is up to 3 % too low."""
    recomputes = "recompute" in run.case
    for phase, low in (("forward_2", 0.03 if recomputes else 0.02), ("loss_2", 0.02), ("backward_2", 0.02)):
        assert -low <= run.ledger.totals[phase] / run.phases[phase] - 1 <= 0.02, phase


def test_the_median_is_within_the_bar() -> None:
    assert median(abs(run.error) for run in RUNS) <= MEDIAN


def test_all_kinds_are_there() -> None:
    words = " ".join(run.case for run in RUNS)
    assert all(word in words for word in ("gpt2", "llama", "qwen3", "fsdp2", "replicate", "pure", "amp", "mixed-18"))
    assert max(run.ranks for run in RUNS) == 64
