"""The phase log of a run: memory after each phase, its change, and its peak."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from memcalc.events.event import EventType
from memcalc.events.timeline import Timeline

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
