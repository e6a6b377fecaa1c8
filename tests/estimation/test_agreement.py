"""The estimate of the day against every recorded trace of a preset: benchmarks/record_traces.py, docs/accuracy.md."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.agreement import Agreement, agreements, error


@pytest.fixture(scope="module")
def found() -> list[Agreement]:
    return agreements()


def test_the_record_covers_the_presets(found: list[Agreement]) -> None:
    assert len(found) >= 96
    assert {run.implementation for run in found} == {"plain", "huggingface"}


@pytest.mark.parametrize("name", ["activations", "peak"])
def test_within_one_percent_and_a_fifth_in_the_median(found: list[Agreement], name: str) -> None:
    errors = {(run.preset, run.implementation): abs(error(getattr(run, name))) for run in found}
    if name == "activations":  # of a model of 1 B with filled windows the mask is a part that the two name otherwise
        assert errors.pop(("gemma-3-1b", "huggingface")) < 0.015

    assert max(errors.values()) < 0.01, max(errors, key=errors.__getitem__)
    assert statistics.median(errors.values()) < 0.002


def test_what_is_said_to_be_reserved_suffices(found: list[Agreement]) -> None:
    """By replay, on the smallest device on which the run ends. Three have tails that no closed formula knows.

    transformers' nanochat needs 2.5 % more than is said, OPT-125M 1.9 %; a rehearsal knows it.
    """
    short = {(run.preset, run.implementation): error(run.need) for run in found if run.need[1] < run.need[0]}

    assert {preset for preset, _ in short} <= {"gpt2-large", "nanochat-d20", "opt-125m"}
    assert all(by > -0.002 for (preset, _), by in short.items() if preset == "gpt2-large")
    assert all(by > -0.025 for by in short.values())
