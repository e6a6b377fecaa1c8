"""Export of a run as a Chrome trace: JSON for chrome://tracing and https://ui.perfetto.dev.

Source of the format: "Trace Event Format", Google, 2016: events M (names), X (durations), C (counters), i (instants).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from memcalc.events.event import Event, EventType
from memcalc.events.memory_curve import MemoryCurve
from memcalc.files import write_text
from memcalc.ledger.component import Component

# Viewers slow down above some hundred thousand events. For longer runs the counters are downsampled and the smallest
# allocations omitted; `otherData` reports both.
SAMPLES = 20_000
INSTANTS = 50_000

_STEPS, _PHASES, _MODULES, _ALLOCATIONS = range(1, 5)  # thread ids, from top to bottom
_THREADS = {_STEPS: "steps", _PHASES: "phases", _MODULES: "modules", _ALLOCATIONS: "allocations"}
_PROCESS = 1


def write_chrome_trace(path: Path | str, curve: MemoryCurve, name: str, *, timed: bool = True) -> None:
    """Write the trace to one file; arguments as for `chrome_trace`."""
    write_text(path, json.dumps(chrome_trace(curve, name, timed=timed), separators=(",", ":")))


def chrome_trace(curve: MemoryCurve, name: str, *, timed: bool = True) -> dict[str, Any]:
    """Return the trace: a counter of bytes by component, durations of phases and modules, instants of allocations.

    Args:
        curve: the memory curve of the run.
        name: of the process in the trace.
        timed: whether the events' times are meaningful. If they are not, or are missing, each event takes one
            microsecond.
    """
    events = curve.timeline.events[: len(curve.totals)]
    timed = timed and _timed(events)
    clock = _clock(events, timed=timed)
    born = [index for index, event in enumerate(events) if event.kind is EventType.ALLOC]
    shown = born if len(born) <= INSTANTS else sorted(nlargest(INSTANTS, born, key=lambda index: events[index].bytes))
    samples = min(SAMPLES, len(events))
    return {
        "traceEvents": [
            *_names(name),
            *_durations(_STEPS, _steps(curve), clock),
            *_durations(_PHASES, ((span.phase, span.begin, span.end) for span in curve.spans), clock),
            *_durations(_MODULES, _modules(events), clock),
            *_counters(curve, samples, clock),
            *_instants(curve, shown, clock),
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "events": len(events),
            "counter_samples": samples,
            "allocations": len(born),
            "allocations_shown": len(shown),
            "times": "recorded" if timed else "one microsecond per event",
        },
    }


def _timed(events: Sequence[Event]) -> bool:
    """Return whether all events have times, in non-decreasing order."""
    times = [event.time_us for event in events]
    return bool(times) and all(
        one is not None and other is not None and one <= other for one, other in pairwise([0, *times])
    )


def _clock(events: Sequence[Event], *, timed: bool) -> list[int]:
    """Return the time of each event in microseconds, followed by the end of the run."""
    if not timed:
        return list(range(len(events) + 1))
    times = [event.time_us or 0 for event in events]
    return [*times, times[-1] + 1]


def _names(name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": _PROCESS, "tid": 0, "name": "process_name", "args": {"name": name}}
    for thread, title in _THREADS.items():
        yield {"ph": "M", "pid": _PROCESS, "tid": thread, "name": "thread_name", "args": {"name": title}}
        yield {"ph": "M", "pid": _PROCESS, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _durations(thread: int, spans: Iterable[tuple[str, int, int]], clock: list[int]) -> Iterator[dict[str, Any]]:
    for name, begin, end in spans:
        lasted = clock[end] - clock[begin]
        yield {"ph": "X", "pid": _PROCESS, "tid": thread, "name": name, "ts": clock[begin], "dur": lasted}


def _steps(curve: MemoryCurve) -> Iterator[tuple[str, int, int]]:
    """Yield the steps: consecutive phases with names that end in the same number."""
    for number, group in groupby(curve.spans, key=lambda span: span.phase.rpartition("_")[2]):
        spans = list(group)
        if number.isdecimal():
            yield f"step {number}", spans[0].begin, spans[-1].end


def _modules(events: Sequence[Event]) -> Iterator[tuple[str, int, int]]:
    """Yield the intervals in which one module allocates, including frees in between."""
    begin, last, current = 0, 0, ""
    for index, event in enumerate(events):
        if event.kind is EventType.PHASE or (event.kind is EventType.ALLOC and event.module != current):
            if current:
                yield current, begin, last + 1
            begin, current = index, event.module if event.kind is EventType.ALLOC else ""
        if event.kind is EventType.ALLOC:
            last = index
    if current:
        yield current, begin, last + 1


def _counters(curve: MemoryCurve, samples: int, clock: list[int]) -> Iterator[dict[str, Any]]:
    """Yield two counters: stacked bytes by component, and reserved bytes."""
    outline = curve.outline(samples)
    names = [_name(component) for component in outline.components]
    common: dict[str, Any] = {"ph": "C", "pid": _PROCESS, "tid": 0}
    for interval in outline.stretches:
        place = common | {"ts": clock[interval.event]}
        yield place | {"name": "bytes by component", "args": dict(zip(names, interval.components, strict=True))}
        if interval.reserved is not None:
            yield place | {"name": "reserved bytes", "args": {"reserved": interval.reserved}}


def _instants(curve: MemoryCurve, shown: Iterable[int], clock: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the allocations with all known attributes and their lifetime."""
    events = curve.timeline.events
    ends = _ends(curve)
    for index in shown:
        event = events[index]
        details: dict[str, Any] = {"bytes": event.bytes, "component": _name(event.component)}
        known = event._asdict()
        details |= {key: known[key] for key in ("phase", "module", "operator", "dtype", "line") if known[key]}
        if event.shape:
            details["shape"] = str(list(event.shape))
        if event.stream:
            details["stream"] = event.stream
        if index in ends:
            details["lived_us"] = clock[ends[index]] - clock[index]
        place = {"ph": "i", "s": "t", "pid": _PROCESS, "tid": _ALLOCATIONS, "ts": clock[index]}
        yield place | {"name": event.operator or _name(event.component), "args": details}


def _ends(curve: MemoryCurve) -> dict[int, int]:
    """Return the position of each allocation's free, by the position of the allocation."""
    born: dict[int, int] = {}
    ends = {}
    for index, event in enumerate(curve.timeline.events[: len(curve.totals)]):
        if event.kind is EventType.ALLOC:
            born[event.storage] = index
        elif event.kind is EventType.FREE:
            ends[born.pop(event.storage)] = index
    return ends


def _name(component: Component | None) -> str:
    return "unattributed" if component is None else component.value
