"""Verdicts of the runs of a search: the only interface between searches and the estimate."""

from __future__ import annotations

from memcalc.ledger.verdict import Verdict
from memcalc.spec.spec import Spec
from memcalc.verdict.judge import gpu_of, is_expected_to_fit, judge
from memcalc.verdict.needs import can_replay, least_bytes


def verdict(spec: Spec) -> Verdict:
    """Return the verdict of a run on its GPU, replayed only if bounds do not decide."""
    return judge(spec)


def is_replayed(spec: Spec) -> bool:
    """Return whether a run's verdict comes from an allocator replay; otherwise it comes from recorded runs."""
    return can_replay(spec)


def is_expected(spec: Spec) -> bool:
    """Return whether the replay of a run completes on its GPU; without a replay, whether it fits."""
    return is_expected_to_fit(spec)


def is_hopeless(spec: Spec) -> bool:
    """Return whether the lower bound exceeds the GPU."""
    gpu = gpu_of(spec)
    return gpu is not None and least_bytes(spec, gpu, gpu.usable_bytes) > gpu.usable_bytes
