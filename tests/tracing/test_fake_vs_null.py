"""Recorded traces on fake tensors against recorded runs on the null device: benchmarks/, docs/reports/accuracy.md."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.fake_vs_null import pairs


def test_peaks_are_the_same_but_for_a_thousandth() -> None:
    """The bar is 0.1 % of the allocated peak."""
    found = pairs()

    assert len(found) >= 96
    assert {run.card for run in found} == {"a100-80gb", "h100-80gb"}
    assert all(abs(run.error) < 0.001 for run in found), max(found, key=lambda run: abs(run.error))


def test_most_runs_are_the_same_to_the_byte_and_reserved_too() -> None:
    found = pairs()

    assert sum(run.equal for run in found) >= 0.95 * len(found)
    assert statistics.median(abs(run.reserved[0] / run.reserved[1] - 1) for run in found) == 0
