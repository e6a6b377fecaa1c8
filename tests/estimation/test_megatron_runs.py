"""Megatron-LM's measured peaks on B200s (benchmarks/published/megatron-b200.yaml): test case T12, stage by stage."""

from __future__ import annotations

import pytest

from tools.published import MIB, TERMS, Peak, Term, mean_and_worst, megatron_peaks, without

PEAKS = megatron_peaks()

# The required bars are a mean of 1 % and a worst of 2 %, to reach 0.5 % and 1 %; reached are 0.0006 % and 0.0024 %.
MEAN, WORST = 0.0001, 0.0005


@pytest.mark.parametrize("peak", PEAKS, ids=lambda peak: peak.run)
def test_each_peak(peak: Peak) -> None:
    """Within 3 MiB of 28 to 148 GiB: unsplit block remainders depend on the rank, and this is the first one."""
    assert abs(peak.error) <= WORST
    assert abs(peak.ledger.peak_bytes - peak.measured) <= 3 * MIB


def test_the_twelve_runs_of_t12() -> None:
    errors = [peak.error for peak in PEAKS if peak.t12]

    assert len({peak.run.partition(", stage")[0] for peak in PEAKS if peak.t12}) == 12
    assert mean_and_worst(errors) <= (MEAN, WORST)


EXPERTS = megatron_peaks("megatron-b200-experts")

# What SimuMax itself is off by on these runs: 0.50 to 0.81 %.
EXPERTS_MEAN, EXPERTS_WORST = 0.0015, 0.0025


def test_experts_and_latent_attention() -> None:
    """DeepSeek-V2 and V3: the peak is in forward, where the tokens exist four times around the grouped matrices.

    0.1 to 0.2 % are missing, 60 to 140 MiB, which no source that was read accounts for.
    """
    errors = [peak.error for peak in EXPERTS]

    assert len(errors) == 6
    assert mean_and_worst(errors) <= (EXPERTS_MEAN, EXPERTS_WORST)
    assert all(error < 0 for error in errors)
    assert {peak.ledger.peak_phase for peak in EXPERTS} <= {"forward_1", "forward_2"}


def test_runs_that_t12_does_not_name() -> None:
    """Longer sequences over tensor and context parallelism together: nothing in them is new."""
    others = [peak.error for peak in PEAKS if not peak.t12]

    assert len(others) == 3
    assert mean_and_worst(others) <= (MEAN, WORST)


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_no_term_is_idle(term: Term) -> None:
    """Without any one of them the estimate would be worse: each is at some run's peak."""
    mean, worst = mean_and_worst([without(peak, term) for peak in PEAKS])
    reached = mean_and_worst([peak.error for peak in PEAKS])

    assert mean > reached[0]
    assert worst > reached[1]
