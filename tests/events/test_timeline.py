"""Streams of events added up over time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.errors import InputError
from memcalc.events import Event, EventType, timeline
from memcalc.ledger.component import Component
from tests.properties.specs import examples

WEIGHTS, ACTIVATIONS = Component.WEIGHTS, Component.ACTIVATIONS

STREAM = [
    Event(EventType.ALLOC, 1, 100, component=WEIGHTS),  # 100, before any phase
    Event(EventType.PHASE, phase="forward_1"),
    Event(EventType.ALLOC, 2, 50, component=ACTIVATIONS),  # 150
    Event(EventType.ALLOC, 3, 8),  # 158: of unknown component
    Event(EventType.FREE, 3),  # 150
    Event(EventType.PHASE, phase="backward_1"),
    Event(EventType.FREE, 2),  # 100
    Event(EventType.ALLOC, 3, 58, component=ACTIVATIONS),  # 158 again, under a number that is free again
    Event(EventType.EMPTY_CACHE),
]


def test_totals_and_peak() -> None:
    result = timeline(STREAM)

    assert result.totals == (100, 100, 150, 158, 150, 150, 100, 158, 158)
    assert result.peak_bytes == 158


def test_what_is_alive_at_a_moment() -> None:
    result = timeline(STREAM)

    assert result.live_after(3) == [STREAM[0], STREAM[2], STREAM[3]]
    assert result.live_after(8) == [STREAM[0], STREAM[7]]
    assert result.by_component(3) == {WEIGHTS: 100, ACTIVATIONS: 50, None: 8}
    assert result.by_component(8) == {WEIGHTS: 100, ACTIVATIONS: 58}


def test_an_empty_stream_has_no_bytes() -> None:
    result = timeline([])

    assert (result.peak_bytes, result.totals) == (0, ())


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (
            [Event(EventType.FREE, 5)],
            "event 0 frees storage 5, which is not allocated. A stream has the alloc and the free of each",
        ),
        ([Event(EventType.ALLOC, 5, 1)] * 2, "event 1 allocates storage 5, which is already allocated."),
    ],
)
def test_events_that_cannot_follow_each_other(events: list[Event], message: str) -> None:
    with pytest.raises(InputError) as error:
        timeline(events)

    assert message in str(error.value)


@st.composite
def streams(draw: st.DrawFn) -> list[Event]:
    """Allocations and frees in any order that is possible."""
    events: list[Event] = []
    alive: list[int] = []
    for number in range(draw(st.integers(0, 30))):
        ends = draw(st.booleans())
        if alive and ends:
            events.append(Event(EventType.FREE, alive.pop(draw(st.integers(0, len(alive) - 1)))))
        component = draw(st.none() | st.sampled_from(Component))
        events.append(Event(EventType.ALLOC, number, draw(st.integers(0, 1000)), component=component))
        alive.append(number)
    return events


@examples(60)
@given(streams())
def test_components_sum_to_the_total_at_every_moment(events: list[Event]) -> None:
    result = timeline(events)

    for index, total in enumerate(result.totals):
        parts = result.by_component(index)
        assert sum(parts.values()) == total == sum(event.bytes for event in result.live_after(index))
