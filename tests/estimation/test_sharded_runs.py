"""Estimates against one rank of FSDP2, DDP and DeepSpeed on the null CUDA device, at 8 and 64 ranks."""

from __future__ import annotations

from statistics import median

import pytest

from tools.sharded import ShardedRun, sharded_runs

RUNS = sharded_runs()

# The bar asked for is a median of 1 %; reached are 0.02 %, and 0.01 % on what was held out.
MEDIAN, WORST = 0.0005, 0.015


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.case)
def test_each_peak(run: ShardedRun) -> None:
    """What is left are the rests of blocks, and how far beyond its bound DeepSpeed's stage 3 gathers."""
    assert abs(run.error) <= WORST


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.case)
def test_the_phases_of_the_second_step(run: ShardedRun) -> None:
    """Forward, loss and backward, not the highest alone.

    Within 2 %, but for runs that recompute: their forward is up to 3 % too low, and DeepSpeed's buckets are taken as
    full whenever they are reduced, up to 5 % too much.
    """
    recomputes = "recompute" in run.case
    for phase, low, high in (("forward_2", 0.03, 0.02), ("loss_2", 0.02, 0.02), ("backward_2", 0.02, 0.05)):
        error = run.ledger.totals[phase] / run.phases[phase] - 1
        assert -(low if recomputes else 0.02) <= error <= (high if recomputes else 0.02), phase


@pytest.mark.parametrize("held_out", [False, True])
def test_the_median_is_within_the_bar(held_out: bool) -> None:
    assert median(abs(run.error) for run in RUNS if run.held_out is held_out) <= MEDIAN


def test_every_engine_is_there_at_8_and_at_64_ranks() -> None:
    assert {(run.engine, run.ranks) for run in RUNS} == {
        (engine, ranks) for engine in ("fsdp2", "ddp", "deepspeed") for ranks in (8, 64)
    }
    assert len(RUNS) >= 30
