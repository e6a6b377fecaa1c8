"""The options and the result of `replay`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from memcalc.allocator.result import ReplayResult
from memcalc.allocator.views import SegmentView
from memcalc.events.event import Event
from memcalc.events.memory_curve import MemoryCurve
from memcalc.replaying.sources import EventSource
from memcalc.snapshots.composition import Composition
from memcalc.snapshots.verification import Verification
from memcalc.spec.hardware.gpus import GpuSpec


@dataclass(frozen=True, slots=True)
class Trial:
    """One allocator with one setting."""

    policy: str  # name of the allocator
    config: str  # its settings
    result: ReplayResult | None  # of the replay; None if the allocator cannot run
    refused: str = ""  # why it cannot run; "" if it can


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The setting with the least reserved memory."""

    trial: Trial
    saved_bytes: int | None  # of reserved memory, compared with the requested setting; None if that one fails
    makes_it_fit: bool  # whether the requested setting fails and this one does not


@dataclass(frozen=True)
class ReplayComparison:
    """A run under one allocator, compared with others."""

    source: EventSource
    gpu: GpuSpec | None
    trials: tuple[Trial, ...]  # the first is the requested one
    recommendation: Recommendation | None
    curve: MemoryCurve  # of the first trial: memory over time
    shown_event: int  # the position of `segments`: the peak of reserved memory, or the end if the run failed
    segments: tuple[SegmentView, ...]
    owners: Mapping[int, Event]  # address -> the allocation there, at that point
    verification: Verification | None  # for complete histories: whether the model reproduces the segments
    composition: Composition | None  # for snapshots: the composition of their memory

    @property
    def result(self) -> ReplayResult:
        """The result of the requested setting."""
        found = self.trials[0].result
        assert found is not None
        return found

    @property
    def failed(self) -> bool:
        """Whether the run runs out of memory with the requested setting."""
        return not self.result.fits


def best(trials: Sequence[Trial]) -> Recommendation | None:
    """Return the setting of the first trial's allocator that fits with the least reserved memory.

    None if that is the first trial itself, or if nothing fits.
    """
    asked = trials[0]
    assert asked.result is not None
    rivals = [t for t in trials if t.policy == asked.policy and t.result is not None and t.result.fits]
    if not rivals or asked.policy == "ideal":
        return None
    winner = min(rivals, key=lambda trial: trial.result.peak_reserved if trial.result else 0)
    assert winner.result is not None
    if not asked.result.fits:
        return Recommendation(winner, None, makes_it_fit=True)
    saved = asked.result.peak_reserved - winner.result.peak_reserved
    return Recommendation(winner, saved, makes_it_fit=False) if saved > 0 else None


class ReplayOptions(TypedDict, total=False):
    """Options of `memcalc.api.replay`."""

    allocator: str  # a name in memcalc.allocator.registry.POLICIES; default: pytorch
    alloc_conf: str  # its settings, as PYTORCH_CUDA_ALLOC_CONF or the framework's flags
    release: str | None  # version of the framework; default: the newest one known
    memory_fraction: float | None  # as in torch.cuda.set_per_process_memory_fraction
    sweep: Sequence[str]  # settings to try, each "key=v1,v2,none"; all combinations are tried
    compare: bool  # whether to replay the other allocators, too
