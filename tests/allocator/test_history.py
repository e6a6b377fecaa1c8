"""The diary of a replay, entry by entry, and what reserved memory consists of at its end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.allocator import history, replay
from memcalc.allocator.fragmentation import PoolUse, pool_uses
from memcalc.events import Event, EventType, timeline
from tests.allocator.running import MIB
from tests.allocator.streams import event_streams
from tests.properties.specs import examples

PAGE = 20 * MIB


def alloc(storage: int, mib: float, stream: int = 0) -> Event:
    return Event(EventType.ALLOC, storage, int(mib * MIB), stream)


def free(storage: int) -> Event:
    return Event(EventType.FREE, storage)


STEP = [
    Event(EventType.PHASE, phase="forward_1"),
    alloc(1, 30),  # a segment of its own
    alloc(2, 5),  # the front of a segment of 20
    free(1),
    Event(EventType.EMPTY_CACHE),  # the 30 go back; the 20 are in use
    alloc(3, 40),
    free(2),
]


def entries(events: list[Event], config: str = "") -> list[tuple[str, int, float, int]]:
    """Action, address, size in MiB and event; addresses in MiB from the first one."""
    found = history(events, config).entries
    first = next(entry.address for entry in found if entry.address >= 0)
    return [
        (entry.action, (entry.address - first) // MIB if entry.address >= 0 else -1, entry.size / MIB, entry.event)
        for entry in found
    ]


def test_what_pytorch_would_have_noted() -> None:
    """A segment comes before the allocation that needed it; a free is requested, then completed.

    The driver's chunks of 32 MiB and 64 MiB lie one below the other.
    """
    assert entries(STEP) == [
        ("segment_alloc", 0, 30, 1),
        ("alloc", 0, 30, 1),
        ("segment_alloc", -32, 20, 2),
        ("alloc", -32, 5, 2),
        ("free_requested", 0, 30, 3),
        ("free_completed", 0, 30, 3),
        ("segment_free", 0, 30, 4),
        ("segment_alloc", -96, 40, 5),  # 30 would be too little
        ("alloc", -96, 40, 5),
        ("free_requested", -32, 5, 6),
        ("free_completed", -32, 5, 6),
    ]


def test_the_counters_after_every_event() -> None:
    found = history(STEP)

    assert [size // MIB for size in found.allocated] == [0, 30, 35, 5, 5, 45, 40]
    assert [size // MIB for size in found.reserved] == [0, 30, 50, 50, 20, 60, 60]
    assert found.result == replay(STEP)


def test_pages_are_mapped_where_they_lie() -> None:
    """30 MiB take two pages of 20, 15 more the 10 that are left and a third page; the first one goes back whole."""
    events = [alloc(1, 30), alloc(2, 15), free(1), Event(EventType.EMPTY_CACHE)]

    assert entries(events, "expandable_segments:True") == [
        ("segment_map", 0, 40, 0),
        ("alloc", 0, 30, 0),
        ("segment_map", 40, 20, 1),
        ("alloc", 30, 15, 1),
        ("free_requested", 0, 30, 2),
        ("free_completed", 0, 30, 2),
        ("segment_unmap", 0, 20, 3),
    ]


def test_where_it_dies() -> None:
    """The request of 40 finds 20 of 50 free: the cached 30 go back, and it is still too little."""
    found = history(STEP[:4] + STEP[5:], capacity=50 * MIB)

    assert [(entry.action, entry.event) for entry in found.entries[-2:]] == [("segment_free", 4), ("oom", 4)]
    assert found.entries[-1].size == 40 * MIB
    assert len(found.allocated) == len(found.reserved) == 4
    assert found.free_bytes == 30 * MIB


def test_other_streams_delay_the_end_of_a_life() -> None:
    events = [alloc(1, 30), Event(EventType.RECORD_STREAM, 1, stream=1), free(1), alloc(2, 30)]
    told = [*events, Event(EventType.FREE_COMPLETED, 1)]

    assert [(entry.action, entry.event) for entry in history(events).entries[2:]] == [
        ("free_requested", 2),
        ("free_completed", 3),  # the next allocation looks first
        ("alloc", 3),
    ]
    assert [(entry.action, entry.event) for entry in history(told).entries[2:]] == [
        ("free_requested", 2),
        ("segment_alloc", 3),
        ("alloc", 3),
        ("free_completed", 4),
    ]


def test_what_was_held_after_an_event() -> None:
    """After event 4, an emptied cache: 5 of 20 MiB, the 30 are gone; the device that it died on had the same."""
    whole, dying = history(STEP), history(STEP, capacity=55 * MIB)
    sizes = [(view.total_size // MIB, view.allocated_size // MIB) for view in whole.segments_at(4)]

    assert sizes == [(20, 5)]
    assert dying.result.failure is not None
    assert dying.segments_at(4) == whole.segments_at(4)
    assert whole.segments_at(-1) == ()
    assert whole.segments_at(6) == whole.result.segments


def test_a_free_that_completes_later_waits_at_that_moment() -> None:
    events = [
        alloc(1, 30),
        Event(EventType.RECORD_STREAM, 1, stream=1),
        free(1),
        alloc(2, 1),
        Event(EventType.FREE_COMPLETED, 1),
    ]
    waiting = [block.state for view in history(events).segments_at(3) for block in view.blocks]

    assert waiting[0] == "active_pending_free"


def test_progress_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcalc.allocator.pytorch.history.EVERY", 3)
    told: list[tuple[str, int, int | None]] = []
    history(STEP, progress=lambda *call: told.append(call))

    assert told == [("allocator", 3, 7), ("allocator", 6, 7), ("allocator", 7, 7)]


def test_what_reserved_memory_consists_of() -> None:
    """5.3 of 20 MiB in use and 14.7 split; 30 free and whole; 600 bytes of a small segment round up to 1,024."""
    events = [alloc(1, 30), Event(EventType.ALLOC, 2, 600), alloc(3, 0.25), alloc(4, 5.3), free(1), free(3)]
    large = int(5.3 * MIB) // 512 * 512 + 512

    assert pool_uses(replay(events).segments) == [
        PoolUse("small", 0, 1, 2 * MIB, 1024, 600, 0, 2 * MIB - 1024, 0, 2 * MIB - 1024),
        PoolUse("large", 0, 2, 50 * MIB, large, int(5.3 * MIB), 0, 20 * MIB - large, 30 * MIB, 30 * MIB),
    ]


def test_a_pool_for_each_stream_and_what_waits() -> None:
    events = [alloc(1, 30, stream=3), Event(EventType.RECORD_STREAM, 1, stream=0), free(1), alloc(2, 20, stream=3)]
    waiting, _ = pool_uses(replay(events[:3]).segments), pool_uses(replay(events).segments)

    assert waiting == [PoolUse("large", 3, 1, 30 * MIB, 0, 0, 30 * MIB, 0, 0, 0)]
    assert (waiting[0].free, waiting[0].rounding) == (0, 0)


@examples(60)
@given(event_streams(streams=True), st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:25"]))
def test_the_diary_agrees_with_the_statistics(events: list[Event], config: str) -> None:
    """Entries add up to the counters, and the pools to the reserved bytes, whatever happens."""
    found = history(events, config)
    sums = dict.fromkeys("alloc free_requested free_completed".split(), 0)
    reserved = 0
    for entry in found.entries:
        if entry.action in sums:
            sums[entry.action] += entry.size
        elif entry.action in {"segment_alloc", "segment_map"}:
            reserved += entry.size
        elif entry.action in {"segment_free", "segment_unmap"}:
            reserved -= entry.size
    statistics = found.result.statistics
    uses = pool_uses(found.result.segments)

    assert found.result == replay(events, config)
    assert sums["alloc"] - sums["free_completed"] == statistics["requested_bytes.all.current"]
    assert reserved == statistics["reserved_bytes.all.current"] == sum(use.reserved for use in uses)
    assert sum(use.split for use in uses) == statistics["inactive_split_bytes.all.current"]
    assert sum(use.allocated + use.waiting for use in uses) == statistics["active_bytes.all.current"]
    for use in uses:
        assert use.reserved == use.allocated + use.waiting + use.split + use.releasable
    for allocated, asked, held in zip(found.allocated, timeline(events).totals, found.reserved, strict=True):
        assert asked <= allocated <= held
