"""Paddle's garbage collection and in-place reuse as changes of a stream, event by event."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.allocator.paddle.collection import collected, reused, step_of, transformed
from memcalc.allocator.paddle.settings import parse_settings
from memcalc.events import Event, EventType, timeline
from tests.allocator.running import MIB
from tests.allocator.streams import event_streams
from tests.properties.specs import examples

GIB = 2**30


def alloc(storage: int, size: int, operator: str = "") -> Event:
    return Event(EventType.ALLOC, storage, size, operator=operator)


def free(storage: int) -> Event:
    return Event(EventType.FREE, storage)


def phase(name: str) -> Event:
    return Event(EventType.PHASE, phase=name)


def shape(events: list[Event]) -> list[str]:
    """Allocations as +bytes, frees as -bytes, phases by name."""
    sizes: dict[int, int] = {}
    words = []
    for event in events:
        if event.kind is EventType.ALLOC:
            sizes[event.storage] = event.bytes
            words.append(f"+{event.bytes}")
        elif event.kind is EventType.FREE:
            words.append(f"-{sizes[event.storage]}")
        else:
            words.append(event.phase)
    return words


STREAM = [alloc(0, 1), alloc(1, 2), free(0), alloc(0, 3), free(1), alloc(1, 4), free(0), free(1), phase("forward_1")]
WORDS = ["+1", "+2", "-1", "+3", "-2", "+4", "-3", "-4", "forward_1"]


def test_a_threshold_of_0_frees_at_once() -> None:
    assert shape(collected(STREAM, 0)) == WORDS


def test_garbage_is_freed_when_enough_has_gathered() -> None:
    # 1, then 1 + 2 = 3: both are freed; 3 is freed separately; 4 too
    assert shape(collected(STREAM, 3)) == ["+1", "+2", "+3", "-1", "-2", "+4", "-3", "-4", "forward_1"]


def test_a_negative_threshold_keeps_everything_to_the_end_of_the_step() -> None:
    stream = [
        phase("forward_1"),
        *STREAM[:5],
        phase("backward_1"),
        *STREAM[5:8],
        phase("forward_2"),
        alloc(5, 5),
        free(5),
    ]

    words = ["forward_1", "+1", "+2", "+3", "backward_1", "+4", "-1", "-2", "-3", "-4", "forward_2", "+5", "-5"]
    assert shape(collected(stream, -1)) == words


def test_only_the_largest_share_of_the_garbage_is_seen() -> None:
    # 1 + 2 + 3 + 4 = 10; of which 7 and more: 4 and 3
    assert shape(collected(STREAM, 0, 0.7)) == ["+1", "+2", "+3", "+4", "-3", "-4", "-1", "-2", "forward_1"]
    assert shape(collected(STREAM, 0, 0.0)) == ["+1", "+2", "+3", "+4", "-1", "-2", "-3", "-4", "forward_1"]


def test_the_slow_mode_waits_for_the_operator_that_is_launched() -> None:
    assert shape(collected(STREAM, 0, fast=False)) == ["+1", "+2", "+3", "-1", "+4", "-2", "-3", "-4", "forward_1"]


def test_an_output_takes_the_buffer_of_an_input_that_dies() -> None:
    stream = [alloc(0, 8), alloc(1, 8, "aten.relu"), free(0), alloc(2, 8, "aten.add.Tensor"), free(1), free(2)]

    assert shape(reused(stream)) == ["+8", "-8"]


@pytest.mark.parametrize("operator", ["reshape", "reshape2", "aten.reshape"])
def test_reshape_takes_its_input_too(operator: str) -> None:
    """Paddle's own example of the strategy."""
    assert shape(reused([alloc(0, 8), alloc(1, 8, operator), free(0), free(1)])) == ["+8", "-8"]


def test_other_operators_sizes_streams_and_shared_storages_keep_their_own() -> None:
    for stream in (
        [alloc(0, 8), alloc(1, 8, "aten.mm"), free(0), free(1)],
        [alloc(0, 8), alloc(1, 4, "aten.relu"), free(0), free(1)],
        [alloc(0, 8)._replace(stream=1), alloc(1, 8, "aten.relu"), free(0), free(1)],
        [alloc(0, 8), alloc(1, 8, "aten.relu"), alloc(2, 1), free(0), free(1), free(2)],
    ):
        assert shape(reused(stream)) == shape(stream)
    shared = [alloc(0, 8), Event(EventType.RECORD_STREAM, 0, stream=1), alloc(1, 8, "aten.relu"), free(0), free(1)]
    assert len(reused(shared)) == len(shared)


def test_a_dynamic_graph_is_left_alone() -> None:
    assert transformed(STREAM, parse_settings("")) is STREAM
    assert shape(list(transformed(STREAM, parse_settings("", version="1.5")))) == [
        "+1", "+2", "+3", "+4", "-1", "-2", "-3", "-4", "forward_1",
    ]  # fmt: skip


def test_steps_are_the_numbers_of_phases() -> None:
    assert [step_of(name) for name in ("model", "forward_1", "optimizer_step_12", "")] == [0, 1, 12, 0]


# Streams have blocks of 1 byte to 120 MiB.
THRESHOLDS = st.one_of(st.integers(2, 200), st.integers(1, 400).map(MIB.__mul__))


@examples(100)
@given(event_streams(), THRESHOLDS)
def test_garbage_is_bounded_by_the_threshold(events: list[Event], threshold: int) -> None:
    """At every allocation: at once <= gathered <= never; and less than the threshold lies around."""
    at_once, gathered, never = (living(collected(events, limit)) for limit in (0, threshold, -1))

    for least, some, most in zip(at_once, gathered, never, strict=True):
        assert least <= some <= most
        assert some < least + threshold


@examples(100)
@given(event_streams(), st.floats(0, 1), st.floats(0, 1))
def test_the_more_garbage_the_collector_sees_the_less_is_alive(events: list[Event], a: float, b: float) -> None:
    less, more = sorted((a, b))

    for few, many in zip(living(collected(events, 0, more)), living(collected(events, 0, less)), strict=True):
        assert few <= many


@examples(100)
@given(event_streams())
def test_slow_collection_and_separate_buffers_never_hold_less(events: list[Event]) -> None:
    fast, slow = living(collected(events)), living(collected(events, fast=False))
    assert all(least <= most for least, most in zip(fast, slow, strict=True))
    assert timeline(reused(events)).peak_bytes <= timeline(events).peak_bytes


@examples(100)
@given(event_streams(), THRESHOLDS, THRESHOLDS)
def test_a_larger_threshold_lets_more_garbage_gather(events: list[Event], a: int, b: int) -> None:
    """The most garbage that ever lies around; and less than the threshold does.

    At the first collection that the larger threshold does not make, it holds at least the smaller one, which is more
    than the smaller one ever holds; up to there both hold the same.
    """
    smaller, larger = sorted((a, b))

    few, much = gathered(events, smaller), gathered(events, larger)

    assert max(few, default=0) <= max(much, default=0) < larger


@examples(100)
@given(event_streams(), THRESHOLDS, THRESHOLDS)
def test_a_larger_threshold_collects_no_earlier(events: list[Event], a: int, b: int) -> None:
    """The first collection of a step, the second one and so on, counted in frees; and so no more often."""
    smaller, larger = sorted((a, b))
    one_step = [event for event in events if event.kind is not EventType.PHASE]

    early, late = collections(one_step, smaller), collections(one_step, larger)

    assert len(late) <= len(early)
    assert all(first <= second for first, second in zip(early, late, strict=False))


def test_between_two_thresholds_the_peaks_of_allocated_memory_have_no_order() -> None:
    """A larger threshold may empty the bin just before the peak: 2 leaves 1 lying around where 3 has freed all."""
    stream = [*(event for i in range(3) for event in (alloc(i, 1), free(i))), alloc(9, 10), free(9)]

    assert timeline(collected(stream, 2)).peak_bytes == 11
    assert timeline(collected(stream, 3)).peak_bytes == 10


def gathered(events: list[Event], threshold: int) -> list[int]:
    """Bytes of garbage after each free: those beyond what is alive where garbage goes at once."""
    marked = []
    for event in events:
        marked += [event, Event(EventType.EMPTY_CACHE)] if event.kind is EventType.FREE else [event]
    some, none = (
        [total for total, event in zip(found.totals, found.events, strict=True) if event.kind is EventType.EMPTY_CACHE]
        for found in (timeline(collected(marked, limit)) for limit in (threshold, 0))
    )
    return [more - less for more, less in zip(some, none, strict=True)]


def collections(events: list[Event], threshold: int) -> list[int]:
    """Which frees, counted from 0, make the collector free what has gathered."""
    sizes: dict[int, int] = {}
    freed = []
    for event in events:
        if event.kind is EventType.ALLOC:
            sizes[event.storage] = event.bytes
        elif event.kind is EventType.FREE:
            freed.append(sizes[event.storage])
    garbage = gathered(events, threshold)
    before = [0, *garbage]
    return [i for i, now in enumerate(garbage) if now == 0 and before[i] + freed[i] > 0]


def living(events: list[Event]) -> list[int]:
    """Bytes alive after each allocation: where peaks are."""
    found = timeline(events)
    return [total for total, event in zip(found.totals, found.events, strict=True) if event.kind is EventType.ALLOC]
