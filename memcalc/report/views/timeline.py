"""Memory over the run as a section: the timeline's document, with the colors, names and formulas that it shows."""

from __future__ import annotations

from typing import Any

from memcalc.documents.timeline import UNATTRIBUTED, TimelineCurve, timeline_document
from memcalc.errors import InputError
from memcalc.events.memory_curve import MemoryCurve
from memcalc.ledger.component import Component
from memcalc.ledger.result import Result
from memcalc.report.labels import label, rank_text
from memcalc.report.plots.palette import color
from memcalc.report.tables.explanation import row_formula, symbol_values
from memcalc.report.views.sections import Section
from memcalc.units import BYTES_PER_UNIT, DECIMALS, Unit, format_bytes
from memcalc.verdict.timeline import timeline_of

FORMULAS = 3  # rows of a component in each phase that the pointer shows, the largest


def memory_section(result: Result, unit: Unit, *, formulas: bool = True) -> Section:
    """Memory over an estimated run; the peak of each phase where its requests are not known.

    Args:
        result: the run.
        unit: of memory.
        formulas: whether the pointer shows the largest rows of a component.
    """
    if result.source != "estimate" or result.spec.inference is not None:
        return phases_section(result, unit, "")
    try:
        course = timeline_of(result.spec, result.headline)
    except InputError as error:
        return phases_section(result, unit, error.problem[:1].upper() + error.problem[1:])
    return timeline_section(course, result, unit, formulas=formulas)


def timeline_section(curve: MemoryCurve, result: Result, unit: Unit, *, formulas: bool = True) -> Section:
    """Memory after every event of a run; see `memory_section`."""
    document = timeline_document(curve, result.spec.name, result.source)
    where = f", {rank_text(result.headline.rank)}" if len(result.ranks) > 1 else ""
    return _section(f"Memory over the run{where}", document, result, unit, formulas=formulas)


def phases_section(result: Result, unit: Unit, note: str) -> Section:
    """Return the peak of each phase, for a run with unknown requests.

    Args:
        result: the run.
        unit: of memory.
        note: why its requests are not known, if there is something to say.
    """
    ledger = result.ledger
    count = len(ledger.phases)
    parts = [ledger.components(phase) for phase in ledger.phases]
    shown = [component for component in Component if any(part.get(component) for part in parts)]
    curve: TimelineCurve = {
        "events": count,
        "completed": True,
        "limit_bytes": _limit(result),
        "peak": {
            "event": ledger.phases.index(ledger.peak_phase),
            "phase": ledger.peak_phase,
            "allocated_bytes": ledger.peak_bytes,
            "reserved_bytes": None,
        },
        "phases": [{"phase": phase, "begin": at, "end": at + 1} for at, phase in enumerate(ledger.phases)],
        "points": {
            "begin": [*range(count)],
            "event": [*range(count)],
            "allocated_bytes": [ledger.totals[phase] for phase in ledger.phases],
            "reserved_bytes": None,
            "component_bytes": {component.value: [part.get(component, 0) for part in parts] for component in shown},
        },
    }
    return _section("Peak of each phase", curve, result, unit, formulas=True) | {"note": note}


def _limit(result: Result) -> int | None:
    """Return the memory that the limit leaves for the allocator, in bytes."""
    if result.limit_bytes is None:
        return None
    outside = result.headline.outside
    return result.limit_bytes - outside.device_context - outside.communication_library


def _section(title: str, curve: TimelineCurve, result: Result, unit: Unit, *, formulas: bool) -> Section:
    peak, points = curve["peak"], curve["points"]
    names = curve["points"]["component_bytes"]
    return {
        "kind": "timeline",
        "title": title,
        "summary": f"Peak {format_bytes(peak['allocated_bytes'], unit)} allocated, in {peak['phase'] or 'no phase'}.",
        "unit": {"name": unit, "bytes": BYTES_PER_UNIT[unit], "decimals": DECIMALS[unit]},
        "components": {
            name: {"label": label(name), "color": color(None if name == UNATTRIBUTED else Component(name))}
            for name in names
        },
        "formulas": _formulas(result) if formulas else {},
        "limit": "usable GPU memory minus CUDA context and NCCL",
        "highest": max((*points["allocated_bytes"], *(points["reserved_bytes"] or ())), default=0),
        "document": curve,
    }


def _formulas(result: Result) -> dict[str, list[dict[str, Any]]]:
    """Return the largest rows of each component in each phase: their phases, and their formula as text."""
    values, ledger = symbol_values(result), result.ledger
    found: dict[str, list[dict[str, Any]]] = {}
    for component in Component:
        rows = sorted((row for row in ledger.rows if row.component is component), key=lambda row: -row.bytes)
        shown = dict.fromkeys(
            row for phase in ledger.phases for row in [row for row in rows if phase in row.phases][:FORMULAS]
        )
        if shown:
            found[component.value] = [{"phases": list(row.phases), "text": row_formula(row, values)} for row in shown]
    return found
