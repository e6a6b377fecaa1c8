"""The run in the manner of a lab notebook: what each phase left behind, what it changed, how high it went."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from memcalc.events.event import Kind
from memcalc.events.timeline import Timeline

BASELINE = "baseline"  # what was there before the first phase began


class Line(NamedTuple):
    """One phase. Bytes."""

    phase: str
    turn: int  # 1, or 2 and so on where the phase came before: a step of several micro-batches
    end: int  # allocated when the phase was over
    change: int  # against the end of the line before
    peak: int  # the most within the phase, its first moment included
    event: int  # the position of that moment; -1 for a baseline of nothing


def notebook(timeline: Timeline, allocated: Sequence[int] | None = None) -> list[Line]:
    """One line for the baseline and one for each phase, in order.

    Args:
        timeline: the stream.
        allocated: bytes that an allocator had handed out after each event (`History.allocated`), to be told in place of
            the bytes asked for. A run that died has fewer of them than events; it is told before it ended.
    """
    totals = timeline.totals if allocated is None else allocated
    marks = [i for i, event in enumerate(timeline.events[: len(totals)]) if event.kind is Kind.PHASE]
    lines = [_line(BASELINE, 1, totals, 0, marks[0] if marks else len(totals), 0)]
    turns: dict[str, int] = {}
    for begin, end in pairwise([*marks, len(totals)]):
        phase = timeline.events[begin].phase
        turns[phase] = turns.get(phase, 0) + 1
        lines.append(_line(phase, turns[phase], totals, begin, end, lines[-1].end))
    return lines


def _line(phase: str, turn: int, totals: Sequence[int], begin: int, end: int, before: int) -> Line:
    within = totals[begin:end]
    if not within:
        return Line(phase, turn, before, 0, before, -1)
    peak = max(within)
    return Line(phase, turn, within[-1], within[-1] - before, peak, begin + within.index(peak))
