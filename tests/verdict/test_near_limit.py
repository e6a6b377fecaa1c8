"""Verdicts of sampled runs near the limit of their GPU, compared with PyTorch on the null CUDA device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from benchmarks.verdict_runs import loaded
from memcalc.measuring.measurement import DONE
from memcalc.verdict.judge import size
from tools.recorded_tables import near_records, near_runs

QUICK = 101  # of so many sampled runs the quick tests replay one


def check(runs: Iterable[tuple[dict[str, Any], Any]], most_undecided: int) -> None:
    """No verdict is wrong, and few are CANNOT SAY."""
    answers: Counter[str] = Counter()
    for record, result in runs:
        answers[result.verdict] += 1
        assert result.verdict in ("unknown", "fits" if record["outcome"] == DONE else "does-not-fit"), record["case"]

    assert answers["unknown"] <= most_undecided


def test_one_of_many() -> None:
    records = near_records()[::QUICK]
    check(((record, size(loaded(record["case"]))) for record in records), 1)

    cases = [record["case"] for record in records]
    for setting in (
        "qlora.",
        "engine=fsdp2",
        "engine=deepspeed",
        "engine=ddp",
        "recompute=full",
        "implementation=plain",
        "inference.",
    ):
        assert any(setting in case for case in cases), setting


@pytest.mark.long
def test_all() -> None:
    runs = near_runs()

    assert len(runs) >= 1956
    check(runs, 48)
