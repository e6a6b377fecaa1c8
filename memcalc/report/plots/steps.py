"""The axis of a picture: phases, and the steps that they belong to."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from memcalc.events.downsampling import PhaseInterval
from memcalc.report.plots.markup import drawable

SETUP = "setup"
TOKENS = "decode"  # phases of generation, which are numbered by token and belong to no step


class AxisMark(NamedTuple):
    """A word on the axis, over the events `begin` to `end` (not included)."""

    word: str
    begin: int
    end: int


def phase_marks(spans: Iterable[PhaseInterval]) -> list[AxisMark]:
    """Return the phases without the number of their step: "forward"."""
    return [AxisMark(drawable(_parts(span.phase)[0]), span.begin, span.end) for span in spans]


def step_marks(spans: Iterable[PhaseInterval]) -> list[AxisMark]:
    """Return the steps ("setup", "step 1", "step 2"); nothing if no phase belongs to a step."""
    marks = []
    for word, group in groupby(spans, key=lambda span: _parts(span.phase)[1]):
        inside = list(group)
        marks.append(AxisMark(word, inside[0].begin, inside[-1].end))
    return marks if any(mark.word != SETUP for mark in marks) else []


def _parts(phase: str) -> tuple[str, str]:
    """ "forward_2" as "forward" and "step 2"."""
    word, _, number = phase.rpartition("_")
    in_step = word and word != TOKENS and number.isdecimal()
    return (word, f"step {number}") if in_step else (phase, SETUP)
