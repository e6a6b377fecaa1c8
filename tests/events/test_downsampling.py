"""Long streams drawn small."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.events import Event, EventType, timeline
from memcalc.events.downsampling import EventInterval, PhaseInterval, downsample
from memcalc.ledger.component import Component
from tests.properties.specs import examples

WEIGHTS, ACTIVATIONS, ROUNDING = Component.WEIGHTS, Component.ACTIVATIONS, Component.BLOCK_ROUNDING

STREAM = [
    Event(EventType.ALLOC, 1, 100, component=WEIGHTS),  # 100
    Event(EventType.PHASE, phase="forward_1"),
    Event(EventType.ALLOC, 2, 50, component=ACTIVATIONS),  # 150
    Event(EventType.ALLOC, 3, 8),  # 158: of unknown component
    Event(EventType.FREE, 3),  # 150
    Event(EventType.PHASE, phase="backward_1"),
    Event(EventType.FREE, 2),  # 100
    Event(EventType.ALLOC, 3, 48, component=ACTIVATIONS),  # 148
    Event(EventType.EMPTY_CACHE),
]


def test_each_interval_keeps_its_peak() -> None:
    """Three stretches of three events: 100, 100, 150 - 158, 150, 150 - 100, 148, 148."""
    found = downsample(timeline(STREAM), 3)

    assert found.components == (WEIGHTS, ACTIVATIONS, None)
    assert found.stretches == (
        EventInterval(0, 3, 2, 150, (100, 50, 0), None),
        EventInterval(3, 6, 3, 158, (100, 50, 8), None),
        EventInterval(6, 9, 7, 148, (100, 48, 0), None),
    )
    assert found.events == (STREAM[2], STREAM[3], STREAM[7])
    assert (found.peak, found.top, found.length, found.failed) == (1, 158, 9, False)


def test_phases_lie_where_their_marks_are() -> None:
    found = downsample(timeline(STREAM), 3)

    assert found.spans == (PhaseInterval("forward_1", 1, 5), PhaseInterval("backward_1", 5, 9))


def test_what_the_allocator_adds_and_holds() -> None:
    """Blocks of 512, one segment of 2,048 from the first event on; 158 bytes in three blocks take 1,536."""
    allocated = [512, 512, 1024, 1536, 1024, 1024, 512, 1024, 1024]
    reserved = [2048] * 8 + [1024]
    found = downsample(timeline(STREAM), 3, allocated, reserved)

    assert found.components == (WEIGHTS, ACTIVATIONS, ROUNDING, None)
    assert [(s.total, s.components, s.reserved) for s in found.stretches] == [
        (1024, (100, 50, 1024 - 150, 0), 2048),
        (1536, (100, 50, 1536 - 158, 8), 2048),
        (1024, (100, 48, 1024 - 148, 0), 2048),
    ]
    assert found.top == 2048


def test_rounding_that_a_recording_named_is_added_to() -> None:
    named = [Event(EventType.ALLOC, 1, 500, component=WEIGHTS), Event(EventType.ALLOC, 2, 12, component=ROUNDING)]
    found = downsample(timeline(named), 2, [500, 1024])

    assert found.components == (WEIGHTS, ROUNDING)
    assert found.stretches[1].components == (500, 524)


@pytest.mark.parametrize(
    ("limit", "drawn", "top"), [(100, 100, 158), (200, 200, 200), (206, None, 158), (None, None, 158)]
)
def test_a_limit_that_is_near_is_drawn(limit: int | None, drawn: int | None, top: int) -> None:
    """Up to 1.3 times the highest value: 205.4 of 158."""
    found = downsample(timeline(STREAM), 3, limit=limit)

    assert (found.limit, found.top) == (drawn, top)


def test_a_run_that_died_is_drawn_as_far_as_it_came() -> None:
    found = downsample(timeline(STREAM), 2, allocated=[512, 512, 1024, 1536])

    assert (found.length, found.failed) == (4, True)
    assert found.spans == (PhaseInterval("forward_1", 1, 4),)


def test_fewer_events_than_stretches() -> None:
    found = downsample(timeline(STREAM[:2]), 80)

    assert [(s.begin, s.end, s.total) for s in found.stretches] == [(0, 1, 100), (1, 2, 100)]


def test_nothing_happened() -> None:
    found = downsample(timeline([]), 80)

    assert (found.stretches, found.components, found.spans, found.peak, found.top) == ((), (), (), -1, 0)


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([*Component, None]))), st.integers(1, 50))
def test_no_peak_is_lost(sizes: list[tuple[int, Component | None]], columns: int) -> None:
    """Whatever the width: the stretches cover the stream, keep its peak, and each is the sum of its components."""
    events = []
    for number, (size, component) in enumerate(sizes):
        events.append(Event(EventType.ALLOC, number, size, component=component))
        if number % 3 == 2:
            events.append(Event(EventType.FREE, number - 1))
    line = timeline(events)
    found = downsample(line, columns)

    assert max((s.total for s in found.stretches), default=0) == line.peak_bytes == found.top
    assert [s.begin for s in found.stretches[1:]] == [s.end for s in found.stretches[:-1]]
    for stretch in found.stretches:
        parts = dict(zip(found.components, stretch.components, strict=True))
        assert sum(stretch.components) == stretch.total == max(line.totals[stretch.begin : stretch.end])
        assert {name: size for name, size in parts.items() if size} == line.by_component(stretch.event)


@pytest.mark.long
def test_millions_of_events_are_drawn_in_seconds() -> None:
    import time

    events = [Event(EventType.ALLOC, number, 512, component=ACTIVATIONS) for number in range(2_000_000)]
    line = timeline(events)
    begin = time.process_time()
    downsample(line, 1000)

    assert time.process_time() - begin < 10  # about 0.7 on the machine that it was written on
