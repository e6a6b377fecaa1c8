"""Streams of events through the allocator."""

from __future__ import annotations

import pytest

from memcalc.allocator import ReplayResult, parse_settings, parse_version, replay
from memcalc.allocator.result import CounterSample
from memcalc.errors import InputError
from memcalc.events import Event, EventType
from tests.allocator.running import MIB


def alloc(storage: int, mib: float, stream: int = 0) -> Event:
    return Event(EventType.ALLOC, storage, int(mib * MIB), stream)


def free(storage: int) -> Event:
    return Event(EventType.FREE, storage)


STEP = [
    Event(EventType.PHASE, phase="model"),
    alloc(1, 30),
    Event(EventType.PHASE, phase="forward_1"),
    alloc(2, 5),  # out of a segment of 20
    alloc(3, 11.5),  # out of what is left of it, 15
    free(2),
    alloc(4, 40),
    free(4),
    alloc(5, 39),  # the 40, whole
    Event(EventType.EMPTY_CACHE),
]


def test_what_a_stream_needs() -> None:
    """Peak: 30 + 11.5 + 40 of 30 + 20 + 40; later 39 take the cached 40 whole, so that the peak is not exceeded."""
    result = replay(STEP)

    assert result.fits
    assert result.peak_allocated == result.statistics["active_bytes.all.peak"] == int(81.5 * MIB)
    assert result.peak_reserved == 90 * MIB
    assert result.peak_allocated_sample == CounterSample(
        event=6,
        allocated=int(81.5 * MIB),
        active=int(81.5 * MIB),
        requested=int(81.5 * MIB),
        reserved=90 * MIB,
        inactive_split=int(8.5 * MIB),
    )
    assert result.peak_allocated_sample.unallocated == int(8.5 * MIB)
    assert result.peak_allocated_sample.unallocated == int(8.5 * MIB)
    assert result.end._replace(event=0) == result.peak_allocated_sample._replace(event=0, requested=int(80.5 * MIB))
    assert result.end.event == 9
    assert result.statistics["num_device_alloc"] == 3
    assert [view.total_size // MIB for view in result.segments] == [40, 20, 30]  # by address, the latest lowest


def test_where_a_run_dies() -> None:
    """80 MiB hold 30 + 20, and not 40 more."""
    result = replay(STEP, capacity=80 * MIB)

    assert not result.fits
    assert result.failure is not None
    assert result.failure.event == 6
    assert result.failure.message.startswith(
        "CUDA out of memory. Tried to allocate 40.00 MiB. GPU 0 has a total capacity of 80.00 MiB of which 30.00 MiB "
        "is free. Of the allocated memory 41.50 MiB is allocated by PyTorch, and 8.50 MiB is reserved by PyTorch"
    )
    assert result.end.event == 5
    assert result.peak_allocated_sample.event == 4  # 30 + 5 + 11.5
    assert (result.statistics["num_alloc_retries"], result.statistics["num_ooms"]) == (1, 1)


def test_what_is_used_from_the_start_counts() -> None:
    assert replay(STEP, capacity=90 * MIB).fits
    assert not replay(STEP, capacity=90 * MIB, used=2 * MIB).fits


def test_settings_decide() -> None:
    """2 MiB in a segment of 60 hold all of it: 50 of 110 MiB are left for 70. In pages its rest counts, too."""
    events = [alloc(1, 60), alloc(2, 40), free(1), alloc(3, 2), free(2), alloc(4, 70)]

    assert replay(events, "expandable_segments:True", capacity=110 * MIB).fits
    assert not replay(events, capacity=110 * MIB).fits


def test_a_fraction_is_a_limit() -> None:
    assert not replay(STEP, capacity=100 * MIB, memory_fraction=0.8).fits
    assert not replay(STEP, "per_process_memory_fraction:0.8", capacity=100 * MIB).fits


def test_ready_made_settings_and_version() -> None:
    version = parse_version("2.12")
    settings = parse_settings("pinned_use_background_threads:True", version)

    assert replay(STEP, settings, version).notes == replay(STEP, "pinned_use_background_threads:True", "2.12").notes
    assert replay(STEP, settings, version).notes != ()


def test_no_events_need_nothing() -> None:
    result = replay([])

    assert (result.fits, result.peak_reserved, result.peak_allocated_sample.event, result.end.event) == (
        True,
        0,
        -1,
        -1,
    )
    assert result.peak_allocated_sample.unallocated == 0


def test_nothing_is_allocated_for_no_bytes() -> None:
    result = replay([alloc(1, 0), Event(EventType.RECORD_STREAM, 1, stream=3), free(1)])

    assert result.peak_reserved == 0


def test_any_iterable_will_do() -> None:
    assert replay(iter(STEP)) == replay(STEP)


def used_elsewhere(*after: Event) -> ReplayResult:
    """A storage of 30 MiB, used on stream 1 too and freed, then these."""
    return replay([alloc(1, 30), Event(EventType.RECORD_STREAM, 1, stream=1), free(1), *after])


def test_other_streams_are_done_at_the_next_allocation() -> None:
    assert used_elsewhere().end.active == 30 * MIB
    assert used_elsewhere(alloc(2, 30)).peak_reserved == 30 * MIB


def test_unless_the_stream_of_events_says_when() -> None:
    done = Event(EventType.FREE_COMPLETED, 1)

    assert used_elsewhere(alloc(2, 30), done).peak_reserved == 60 * MIB
    assert used_elsewhere(alloc(2, 30), done).statistics["active_bytes.all.peak"] == 60 * MIB
    assert used_elsewhere(done, alloc(2, 30)).peak_reserved == 30 * MIB


def test_a_death_that_was_recorded_gets_another_chance() -> None:
    """If memory suffices, it is a request that is freed at once."""
    events = [alloc(1, 30), Event(EventType.OOM, bytes=50 * MIB), alloc(2, 10)]

    assert replay(events, capacity=90 * MIB).peak_allocated == 80 * MIB
    failure = replay(events, capacity=70 * MIB).failure
    assert failure is not None
    assert failure.event == 1


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([free(1)], "event 0 frees storage 1, which is not allocated."),
        ([alloc(1, 1), free(1), free(1)], "event 2 frees storage 1, which is not allocated."),
        ([alloc(1, 1), alloc(1, 1)], "event 1 allocates storage 1, which is already allocated."),
        ([Event(EventType.RECORD_STREAM, 1)], "event 0 uses storage 1, which is not allocated."),
    ],
)
def test_events_that_cannot_follow_each_other(events: list[Event], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replay(events)


def test_what_the_version_refuses_is_refused() -> None:
    with pytest.raises(InputError, match=r"torch 2\.6 has no allocator option 'large_segment_size_mb'"):
        replay([], "large_segment_size_mb:30", "2.6")
    with pytest.raises(InputError, match=r"the allocator of torch '2\.5' is not modelled"):
        replay([], version="2.5")
