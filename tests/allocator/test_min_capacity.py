"""The least memory in which a stream ends."""

from __future__ import annotations

from hypothesis import given

from benchmarks.min_capacity import STEP, least_memory
from memcalc.allocator import replay
from memcalc.events import Event, EventType
from tests.allocator.running import MIB
from tests.allocator.streams import event_streams
from tests.properties.specs import examples


def alloc(storage: int, mib: int) -> Event:
    return Event(EventType.ALLOC, storage, mib * MIB)


def test_cached_blocks_are_freed_to_the_device_before_it_fails() -> None:
    """40 cached and 42 more are reserved where there is room; 42 suffice."""
    events = [alloc(1, 40), Event(EventType.FREE, 1), alloc(2, 42)]

    assert replay(events).peak_reserved == 82 * MIB
    assert least_memory(events) == 42 * MIB


def test_split_segments_cannot_be_freed_to_the_device() -> None:
    """30, and 20 of which 5 are free and 11.5 in use, and 40 that fit into no hole."""
    events = [alloc(1, 30), alloc(2, 5), alloc(3, 11), Event(EventType.FREE, 2), alloc(4, 40)]

    assert least_memory(events) == (30 + 20 + 40) * MIB


def test_settings_count() -> None:
    """60 of a cached 100, and 80 that the other 40 do not hold; an expandable segment grows by 40 instead."""
    events = [alloc(1, 100), Event(EventType.FREE, 1), alloc(2, 60), alloc(3, 80)]

    assert least_memory(events) == (100 + 80) * MIB
    assert least_memory(events, "expandable_segments:True") == (60 + 80) * MIB


def test_nothing_needs_nothing() -> None:
    assert least_memory([]) == 0


@examples(30)
@given(event_streams())
def test_it_fits_there_and_not_below(events: list[Event]) -> None:
    least = least_memory(events)

    assert replay(events, capacity=least).fits
    assert least == 0 or not replay(events, capacity=least - STEP).fits
    assert least <= -(-replay(events).peak_reserved // STEP) * STEP
