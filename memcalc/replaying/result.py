"""What `replay` answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memcalc.allocator.policy import SegmentView
from memcalc.allocator.result import ReplayResult
from memcalc.events.course import Course
from memcalc.events.event import Event
from memcalc.replaying.sources import Source
from memcalc.snapshots.composition import Composition
from memcalc.snapshots.verification import Verification
from memcalc.spec.cards import Card


@dataclass(frozen=True, slots=True)
class Trial:
    """One allocator with one setting."""

    policy: str
    config: str
    result: ReplayResult | None  # None where it cannot be asked; `refused` says why
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The setting that serves the run best."""

    trial: Trial
    saved_bytes: int | None  # of reserved memory, against the setting asked about; None where that one fails
    makes_it_fit: bool  # whether the setting asked about fails and this one does not


@dataclass(frozen=True)
class Replay:
    """A run through one allocator, and beside others."""

    source: Source
    card: Card | None
    trials: tuple[Trial, ...]  # the first is the one that was asked about
    recommendation: Recommendation | None
    course: Course  # of the first trial: memory over time
    shown_event: int  # the moment of `segments`: the most reserved memory, or the end where the run died
    segments: tuple[SegmentView, ...]
    owners: Mapping[int, Event]  # which allocation lies at an address, at that moment
    verification: Verification | None  # of a snapshot whose begin is known: whether the model makes its segments
    composition: Composition | None  # of a snapshot: what its memory is made of

    @property
    def result(self) -> ReplayResult:
        """Of the setting that was asked about."""
        found = self.trials[0].result
        assert found is not None
        return found

    @property
    def failed(self) -> bool:
        """Whether the run dies with the setting that was asked about."""
        return not self.result.fits


def best(trials: Sequence[Trial]) -> Recommendation | None:
    """Of the settings of the first trial's allocator, the one that fits with the least reserved memory.

    None where that is the first one itself, or where nothing fits.
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
