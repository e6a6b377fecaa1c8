"""The memory curve of a run, from which plots and tables are made, and its log of phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from memcalc.events.downsampling import DownsampledTimeline, PhaseInterval, downsample, near_events, spans
from memcalc.events.event import Event, EventType
from memcalc.events.timeline import Timeline


@dataclass(frozen=True)
class MemoryCurve:
    """The memory curve of an event stream, optionally with the figures of an allocator replay."""

    timeline: Timeline  # the stream
    # allocated bytes after each event (`History.allocated`), with fewer entries than events if the run ran out of
    # memory. None without an allocator replay; then requested bytes are used.
    allocated: Sequence[int] | None = None
    reserved: Sequence[int] | None = None  # reserved bytes after each event, with the same length
    limit: int | None = None  # bytes of device memory that the allocator may use

    @property
    def totals(self) -> Sequence[int]:
        """Allocated bytes after each event that completed."""
        return self.timeline.totals if self.allocated is None else self.allocated

    @cached_property
    def peak_bytes(self) -> int:
        """Peak allocated bytes."""
        return max(self.totals, default=0)

    @cached_property
    def top(self) -> int:
        """The maximum of a plot's y axis in bytes, as in every outline."""
        value = max(self.peak_bytes, max(self.reserved or (), default=0))
        return max(value, near_events(self.limit, value) or 0)

    @cached_property
    def peak_event(self) -> int:
        """The position of the first event at the peak; -1 for an empty stream."""
        return self.totals.index(self.peak_bytes) if self.totals else -1

    @cached_property
    def spans(self) -> tuple[PhaseInterval, ...]:
        """The event interval of each phase."""
        return tuple(spans(self.timeline.events, len(self.totals)))

    def phase_of(self, event: int) -> str:
        """Return the phase that an event belongs to; "" before the first phase."""
        return next((span.phase for span in reversed(self.spans) if span.begin <= event), "")

    def live_at_peak(self) -> list[Event]:
        """Return the allocations that are live at the peak, in allocation order."""
        return self.timeline.live_after(self.peak_event)

    def outline(self, stretches: int) -> DownsampledTimeline:
        """Return the curve downsampled to at most `stretches` intervals, each represented by its peak."""
        return downsample(self.timeline, stretches, self.allocated, self.reserved, self.limit)

    def notebook(self) -> list[PhaseLogLine]:
        """Return one line per phase."""
        return phase_log(self.timeline, self.allocated)


BASELINE = "baseline"  # memory before the first phase


class PhaseLogLine(NamedTuple):
    """One phase. Bytes."""

    phase: str
    turn: int  # 1 for the first occurrence of the phase, 2 for the second (several micro-batches)
    end: int  # allocated at the end of the phase
    change: int  # relative to the previous line's `end`
    peak: int  # peak within the phase, including its start
    event: int  # the position of the peak; -1 for an empty baseline


def phase_log(timeline: Timeline, allocated: Sequence[int] | None = None) -> list[PhaseLogLine]:
    """Return one line for the baseline and one for each phase, in order.

    Args:
        timeline: the stream.
        allocated: allocated bytes after each event (`History.allocated`), reported instead of requested bytes. A run
            that ran out of memory has fewer entries than events; the log ends with the last entry.
    """
    totals = timeline.totals if allocated is None else allocated
    marks = [i for i, event in enumerate(timeline.events[: len(totals)]) if event.kind is EventType.PHASE]
    lines = [_line(BASELINE, 1, totals, 0, marks[0] if marks else len(totals), 0)]
    turns: dict[str, int] = {}
    for begin, end in pairwise([*marks, len(totals)]):
        phase = timeline.events[begin].phase
        turns[phase] = turns.get(phase, 0) + 1
        lines.append(_line(phase, turns[phase], totals, begin, end, lines[-1].end))
    return lines


def _line(phase: str, turn: int, totals: Sequence[int], begin: int, end: int, before: int) -> PhaseLogLine:
    within = totals[begin:end]
    if not within:
        return PhaseLogLine(phase, turn, before, 0, before, -1)
    peak = max(within)
    return PhaseLogLine(phase, turn, within[-1], within[-1] - before, peak, begin + within.index(peak))
