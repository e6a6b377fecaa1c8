"""Memory over a run as a JSON document, for plots, the page and other programs."""

from __future__ import annotations

from typing import Any

from memcalc.events.course import Course
from memcalc.ledger.component import Component

SCHEMA_VERSION = 1
POINTS = 600  # about one for every second pixel of a wide plot
UNATTRIBUTED = "unattributed"  # bytes without a component


def timeline_document(course: Course, name: str, source: str, points: int = POINTS) -> dict[str, Any]:
    """Return memory over a run, ready for `json.dumps`.

    Args:
        course: the memory curve of the run.
        name: of the run.
        source: "estimate", "trace", "dry-run" or "measure".
        points: maximum number of points; each is the peak of its interval of events, so no peak is lost.
    """
    outline = course.outline(points)
    return {
        "schema_version": SCHEMA_VERSION,
        "source": source,
        "name": name,
        "events": outline.length,
        "completed": not outline.failed,
        "limit_bytes": course.limit,
        "peak": {
            "event": course.peak_event,
            "phase": course.phase_of(course.peak_event),
            "allocated_bytes": course.peak_bytes,
            "reserved_bytes": None if course.reserved is None else max(course.reserved, default=0),
        },
        "phases": [{"phase": span.phase, "begin": span.begin, "end": span.end} for span in outline.spans],
        "points": {
            "begin": [stretch.begin for stretch in outline.stretches],
            "event": [stretch.event for stretch in outline.stretches],
            "allocated_bytes": [stretch.total for stretch in outline.stretches],
            "reserved_bytes": None if course.reserved is None else [stretch.reserved for stretch in outline.stretches],
            "component_bytes": {
                component_name(component): [stretch.components[at] for stretch in outline.stretches]
                for at, component in enumerate(outline.components)
            },
        },
    }


def component_name(component: Component | None) -> str:
    """Return a component's key, as in the JSON of an estimate."""
    return UNATTRIBUTED if component is None else component.value
