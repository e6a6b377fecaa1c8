"""Blocks that other streams use."""

from __future__ import annotations

from tests.allocator.running import MIB, allocator, figures, reserved_mib


def test_a_freed_block_is_active_until_the_next_allocation() -> None:
    subject = allocator()
    block = subject.malloc(30 * MIB, stream=0)
    subject.record_stream(block, 1)
    subject.free(block)
    statistics = subject.statistics()
    assert statistics["allocated_bytes.all.current"] == 0
    assert statistics["active_bytes.all.current"] == statistics["requested_bytes.all.current"] == 30 * MIB
    assert subject.segments()[0].blocks[0].state == "active_pending_free"

    again = subject.malloc(30 * MIB, stream=0)  # any allocation looks at the events
    assert again.address == block.address
    assert subject.counters.active_bytes == reserved_mib(subject) * MIB == 30 * MIB


def test_its_own_stream_does_not_count() -> None:
    subject = allocator()
    block = subject.malloc(30 * MIB, stream=1)
    subject.record_stream(block, 1)
    subject.free(block)

    assert subject.counters.active_bytes == 0


def test_while_the_other_stream_is_busy_the_block_is_not_reused() -> None:
    """The peak of active bytes is above that of allocated ones."""
    subject = allocator()
    subject.uses.ready = False
    block = subject.malloc(30 * MIB)
    subject.record_stream(block, 1)
    subject.free(block)
    subject.malloc(30 * MIB)

    statistics = subject.statistics()
    assert reserved_mib(subject) == 60
    assert statistics["active_bytes.all.peak"] == 60 * MIB
    assert statistics["allocated_bytes.all.peak"] == 30 * MIB
    assert statistics["active.all.peak"] == 2
    assert statistics["allocation.all.peak"] == 1


def test_every_recorded_stream_has_to_be_done() -> None:
    subject = allocator()
    block = subject.malloc(30 * MIB)
    for stream in (1, 2, 1):
        subject.record_stream(block, stream)
    subject.free(block)

    assert list(subject.uses.waiting.values()) == [2]  # one event for each of two streams
    subject.uses.process()
    assert subject.counters.active_bytes == 0


def test_emptying_the_cache_waits_for_all_streams() -> None:
    subject = allocator()
    subject.uses.ready = False
    block = subject.malloc(30 * MIB)
    subject.record_stream(block, 1)
    subject.free(block)
    subject.empty_cache()

    assert figures(subject) == (0, 0, 0)
    assert subject.counters.num_sync_all_streams == 1


def test_a_completion_that_is_reported() -> None:
    """As recorded streams of events have it: freed now, done later, whatever is allocated in between."""
    subject = allocator()
    block = subject.malloc(30 * MIB)
    subject.free_until_completed(block)
    subject.malloc(30 * MIB)
    assert (subject.counters.allocated_bytes, subject.counters.active_bytes) == (30 * MIB, 60 * MIB)

    subject.complete(block)
    assert subject.counters.active_bytes == 30 * MIB
    assert subject.malloc(30 * MIB).address == block.address


def test_a_completion_after_the_cache_was_emptied_is_nothing() -> None:
    subject = allocator()
    block = subject.malloc(30 * MIB)
    subject.free_until_completed(block)
    subject.empty_cache()
    subject.complete(block)

    assert figures(subject) == (0, 0, 0)


def test_during_a_capture_no_event_is_looked_at() -> None:
    subject = allocator()
    block = subject.malloc(30 * MIB)
    subject.record_stream(block, 1)
    subject.private.begin(1, capture=True)
    subject.free(block)
    subject.malloc(30 * MIB)
    assert subject.counters.active_bytes == 60 * MIB

    subject.private.end(1)
    subject.malloc(1)
    assert subject.counters.active_bytes == 30 * MIB + 512


def test_the_peak_of_active_bytes_stays() -> None:
    """30 wait while 40 are allocated: 70. Later 30 wait while 10 are allocated, which is less."""
    subject = allocator()
    subject.uses.ready = False
    shared, large = subject.malloc(30 * MIB), subject.malloc(20 * MIB)
    subject.record_stream(shared, 1)
    subject.free(shared)
    larger = subject.malloc(20 * MIB)
    subject.free(large)
    subject.free(larger)
    subject.malloc(10 * MIB)

    statistics = subject.statistics()
    assert statistics["active_bytes.all.peak"] == statistics["active_bytes.large_pool.peak"] == 70 * MIB
    assert statistics["active.all.peak"] == statistics["active.large_pool.peak"] == 3
    assert statistics["active_bytes.all.current"] == 40 * MIB

    subject.counters.reset_peaks()
    assert subject.statistics()["active_bytes.all.peak"] == 40 * MIB
