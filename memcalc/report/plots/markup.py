"""Text from anywhere inside pictures (SVG, HTML, and what matplotlib draws), and the words of their axis."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import Any, NamedTuple

from memcalc.events.downsampling import PhaseInterval
from memcalc.text import harmless, shortened_in_the_middle

# What XML 1.0 cannot hold, not even escaped: lone surrogates and the two noncharacters of the first plane.
_FORBIDDEN = re.compile("[\ud800-\udfff\ufffe\uffff]")

# Inside <script> neither tags nor comments may begin; U+2028 and U+2029 end a line in older browsers.
_IN_SCRIPTS = re.compile("[<>&\u2028\u2029]")

_LONGEST_HEADING = 120  # characters that fit above a picture


def drawable(text: str) -> str:
    """Return the text as a picture can show it."""
    return _FORBIDDEN.sub("\ufffd", harmless(text))


def heading(text: str) -> str:
    """Return the text as the heading of a picture: so short that the picture keeps its place."""
    return shortened_in_the_middle(drawable(text), _LONGEST_HEADING)


def markup(text: str) -> str:
    """Return the text for an element or a quoted attribute of SVG and HTML, escaped."""
    return escape(drawable(text))


def script_data(value: Any) -> str:
    """Return JSON for a <script> element."""
    text = json.dumps(value, separators=(",", ":"))
    return _IN_SCRIPTS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


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
