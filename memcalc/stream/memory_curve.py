"""The memory curve of a run from its requests: the same curve as of traces and recorded runs, without a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memcalc.allocator.pytorch.constants import STREAM_SHIFT
from memcalc.allocator.pytorch.script_replay import ScriptAllocator, allocator_of
from memcalc.allocator.pytorch.versions import DEFAULT_VERSION
from memcalc.events.event import Event, EventType
from memcalc.events.memory_curve import MemoryCurve
from memcalc.events.timeline import Timeline
from memcalc.stream.requests import RequestInterval, Requests


class MemoryLevel(NamedTuple):
    """Allocated and reserved bytes after a request."""

    allocated: int
    reserved: int


def memory_curve(
    requests: Requests,
    alloc_conf: str = "",
    torch: str = DEFAULT_VERSION,
    room: int | None = None,
    capacity: int | None = None,
) -> MemoryCurve:
    """Return the memory curve of a run, by component, with the allocated and reserved bytes of an allocator replay.

    The steady step is replayed twice; the second replay becomes the third step, as in a trace.

    Args:
        requests: the run.
        alloc_conf: as for `replay`.
        torch: as for `replay`.
        room: as for `replay`.
        capacity: as for `replay`.

    Raises:
        InputError: the version does not accept these settings.
        OutOfMemory: a request does not fit.
    """
    stretches = [interval for interval in requests.stretches if not interval.is_empty]
    levels = [*_levels(stretches, allocator_of(alloc_conf, torch, room, capacity))]
    events, deltas, changed = _events(stretches, requests)
    limit = room if room is not None else capacity
    return MemoryCurve(
        Timeline(tuple(events), tuple(deltas), tuple(changed)),
        [level.allocated for level in levels],
        [level.reserved for level in levels],
        limit,
    )


def _named(stretches: Sequence[RequestInterval]) -> Iterator[tuple[RequestInterval, str, bool]]:
    """Yield each interval with its phase, numbered by step, and whether it begins that phase."""
    step, before = 0, ""
    for interval in stretches:
        kind, _, number = interval.phase.rpartition("_")
        begins = interval.phase != before
        step += begins and kind == "zero_grad"
        before = interval.phase
        yield interval, f"{kind}_{step}" if number.isdigit() else interval.phase, begins


def _events(
    stretches: Sequence[RequestInterval], requests: Requests
) -> tuple[list[Event], list[int], list[Event | None]]:
    """Return the events, the change of live bytes by each event, and the allocation it makes or frees."""
    events: list[Event] = []
    deltas: list[int] = []
    changed: list[Event | None] = []
    made: list[Event] = []
    for interval, phase, begins in _named(stretches):
        if begins:
            events.append(Event(EventType.PHASE, phase=phase))
            deltas.append(0)
            changed.append(None)
        for change in interval.script:
            if change >= 0:
                stream = change >> STREAM_SHIFT
                size, component = change - (stream << STREAM_SHIFT), requests.component(len(made))
                subject = Event(EventType.ALLOC, len(made), size, stream, component)
                events.append(subject)
                made.append(subject)
                deltas.append(size)
            else:
                subject = made[~change]
                events.append(Event(EventType.FREE, ~change, stream=subject.stream))
                deltas.append(-subject.bytes)
            changed.append(subject)
    return events, deltas, changed


def _levels(stretches: Sequence[RequestInterval], allocator: ScriptAllocator) -> Iterator[MemoryLevel]:
    """Yield one level per event, in the order of `_events`."""
    allocated = 0
    sizes: list[int] = []  # of the block of each request
    for interval, _, begins in _named(stretches):
        if begins:
            yield MemoryLevel(allocated, allocator.reserved_bytes)
        if interval.after_empty_cache:
            allocator.empty_cache()
        for change in interval.script:
            most = allocator.play((change,)).allocated  # the peak is after an allocation, and before a free
            if change >= 0:
                sizes.append(most - allocated)
                allocated = most
            else:
                allocated -= sizes[~change]
            yield MemoryLevel(allocated, allocator.reserved_bytes)
