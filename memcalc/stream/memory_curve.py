"""The memory curve of a run from its requests, as of traces and recorded runs, but without a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memcalc.allocator.pytorch.constants import MIN_BLOCK, SIZE_MASK, STREAM_SHIFT
from memcalc.allocator.pytorch.script_replay import ScriptAllocator, allocator_of
from memcalc.allocator.pytorch.versions import DEFAULT_VERSION
from memcalc.events.event import Event, EventType
from memcalc.events.memory_curve import MemoryCurve
from memcalc.events.timeline import Timeline
from memcalc.stream.requests import RequestInterval, Requests


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
        alloc_conf: see `replay`.
        torch: see `replay`.
        room: see `replay`.
        capacity: see `replay`.

    Raises:
        InputError: the version does not accept these settings.
        OutOfMemory: a request does not fit.
    """
    stretches = [interval for interval in requests.stretches if not interval.is_empty]
    allocated, reserved = _levels(stretches, allocator_of(alloc_conf, torch, room, capacity))
    events, deltas, changed = _events(stretches, requests)
    limit = room if room is not None else capacity
    return MemoryCurve(Timeline(tuple(events), tuple(deltas), tuple(changed)), allocated, reserved, limit)


def _named(stretches: Sequence[RequestInterval]) -> Iterator[tuple[RequestInterval, str, bool]]:
    """Yield each interval with its phase, numbered by step, and whether it is the first of that phase."""
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
    alloc, free, components = EventType.ALLOC, EventType.FREE, requests.components
    for interval, phase, begins in _named(stretches):
        if begins:
            events.append(Event(EventType.PHASE, phase=phase))
            deltas.append(0)
            changed.append(None)
        for change in interval.script:
            if change >= 0:
                stream, size = change >> STREAM_SHIFT, change & SIZE_MASK
                subject = Event(alloc, len(made), size, stream, components[len(made)])
                events.append(subject)
                made.append(subject)
                deltas.append(size)
            else:
                subject = made[~change]
                events.append(Event(free, ~change, 0, subject.stream))
                deltas.append(-subject.bytes)
            changed.append(subject)
    return events, deltas, changed


def _levels(stretches: Sequence[RequestInterval], allocator: ScriptAllocator) -> tuple[list[int], list[int]]:
    """Return allocated and reserved bytes after each event, in the order of `_events`.

    An interval is served in one call, and its levels are then the sums of the blocks that its requests got.
    """
    allocated, reserved = [0], [0]
    number, growth = 0, 0  # numbers of served requests, and of used entries of `growth`
    for interval, _, begins in _named(stretches):
        if begins:
            allocated.append(allocated[-1])
            reserved.append(allocator.reserved_bytes)
        if interval.after_empty_cache:
            allocator.empty_cache()
        held, mapped = allocated[-1] // MIN_BLOCK, allocator.reserved_bytes
        allocator.play(interval.script)
        sizes, grown = allocator.block_sizes, iter(allocator.growth[growth:])
        growth = len(allocator.growth)
        following = next(grown, None)
        for change in interval.script:
            if change >= 0:
                held += sizes[number]
                if following is not None and following[0] == number:
                    mapped, following = following[1], next(grown, None)
                number += 1
            else:
                held -= sizes[~change]
            allocated.append(held * MIN_BLOCK)
            reserved.append(mapped)
    return allocated[1:], reserved[1:]
