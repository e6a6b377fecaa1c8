"""The document of memory over a run, for plots, the page and other programs."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from memcalc.documents.shared import filled
from memcalc.events.memory_curve import MemoryCurve
from memcalc.ledger.component import Component
from memcalc.ledger.result import Source


class TimelinePeak(TypedDict):
    """The peak of allocated memory."""

    event: int
    """its position in the run, from 0; -1 if the run has no events"""
    phase: str
    allocated_bytes: int
    reserved_bytes: int | None
    """the most over the whole run; null where no allocator is known"""


class TimelinePhase(TypedDict):
    """A phase of the run: events `begin` to `end` (exclusive)."""

    phase: str
    begin: int
    end: int


class TimelinePoints(TypedDict):
    """The curve as lists of equal length. A point is the peak of the events from its begin to the next begin."""

    begin: list[int]
    event: list[int]
    """the point of its peak"""
    allocated_bytes: list[int]
    reserved_bytes: list[int] | None
    """the most among the point's events"""
    component_bytes: dict[str, list[int]]
    """at that event; they sum to allocated_bytes"""


class TimelineCurve(TypedDict):
    """Memory over a run."""

    events: int
    """number of allocations, frees and phase starts"""
    completed: bool
    """false where the run ran out of memory"""
    limit_bytes: int | None
    """GPU memory that is available to the allocator"""
    peak: TimelinePeak
    phases: list[TimelinePhase]
    points: TimelinePoints


class TimelineDocument(TimelineCurve):
    """The document that `--plot FILE.json` writes: memory over three training steps, or over a recorded run."""

    schema_version: Literal[1]
    source: Source
    name: str


POINTS = 600  # about one for every second pixel of a wide plot
UNATTRIBUTED = "unattributed"  # bytes without a component


def timeline_document(curve: MemoryCurve, name: str, source: Source, points: int = POINTS) -> TimelineDocument:
    """Return memory over a run.

    Args:
        curve: the memory curve of the run.
        name: of the run.
        source: where the run comes from.
        points: maximum number of points; each is the peak of its interval of events, so no peak is lost.
    """
    outline = curve.outline(points)
    return {
        "schema_version": 1,
        "source": source,
        "name": name,
        "events": outline.length,
        "completed": not outline.failed,
        "limit_bytes": curve.limit,
        "peak": {
            "event": curve.peak_event,
            "phase": curve.phase_of(curve.peak_event),
            "allocated_bytes": curve.peak_bytes,
            "reserved_bytes": None if curve.reserved is None else max(curve.reserved, default=0),
        },
        "phases": [filled(TimelinePhase, span) for span in outline.spans],
        "points": {
            "begin": [interval.begin for interval in outline.stretches],
            "event": [interval.event for interval in outline.stretches],
            "allocated_bytes": [interval.total for interval in outline.stretches],
            "reserved_bytes": None
            if curve.reserved is None
            else [interval.reserved or 0 for interval in outline.stretches],
            "component_bytes": {
                component_name(component): [interval.components[at] for interval in outline.stretches]
                for at, component in enumerate(outline.components)
            },
        },
    }


def component_name(component: Component | None) -> str:
    """Return a component's key, as in the document of an estimate."""
    return UNATTRIBUTED if component is None else component.value
