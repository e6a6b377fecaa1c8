"""Estimates against randomly sampled runs recorded on the null CUDA device, with the required bounds."""

from __future__ import annotations

from statistics import median

import pytest

from tools.sampled_runs import Run, drawn, is_held_out

# A quick test keeps the tables of docs/reports/accuracy.md fresh, which have every figure.
pytestmark = pytest.mark.long

MEDIAN, WORST = 0.003, 0.02  # of one GPU
MEDIAN_OF_RANKS = 0.01


def runs(*, alone: bool, held_out: bool = False) -> list[Run]:
    """Those of one GPU or of many, of all lists or of those held out."""
    return [run for run in drawn() if run.alone is alone and (is_held_out(run.file) or not held_out)]


@pytest.mark.parametrize("held_out", [False, True])
def test_one_gpu(held_out: bool) -> None:
    errors = [abs(run.error) for run in runs(alone=True, held_out=held_out)]

    assert median(errors) <= MEDIAN
    assert max(errors) <= WORST


@pytest.mark.parametrize("held_out", [False, True])
def test_ranks_of_many(held_out: bool) -> None:
    errors = [abs(run.error) for run in runs(alone=False, held_out=held_out)]

    assert median(errors) <= MEDIAN_OF_RANKS


def test_there_are_as_many_as_asked_for() -> None:
    """150 cases, 12 families, and every engine at 8 and at 64 ranks."""
    assert len(drawn()) >= 150
    assert len({run.family for run in runs(alone=True)}) >= 12
    spreads = {(run.spec.parallelism.engine, run.spec.parallelism.ranks) for run in runs(alone=False)}
    assert spreads == {(engine, ranks) for engine in ("fsdp2", "ddp", "deepspeed") for ranks in (8, 64)}
