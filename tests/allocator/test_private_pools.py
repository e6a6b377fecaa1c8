"""Memory pools apart from the default one."""

from __future__ import annotations

import pytest

from memcalc.errors import OutOfMemory
from tests.allocator.running import MIB, VERSIONS, allocated_mib, allocator, reserved_mib


def test_the_worked_example() -> None:
    """In a pool 100 + 5 MiB (a segment of 20), the 100 freed; 50 of the default pool do not come out of them."""
    subject = allocator()
    subject.private.begin(7)
    large, small = subject.malloc(100 * MIB), subject.malloc(5 * MIB)
    subject.free(large)
    subject.private.end(7)
    subject.malloc(50 * MIB)
    assert (allocated_mib(subject), reserved_mib(subject)) == (55, 170)

    subject.empty_cache()
    assert reserved_mib(subject) == 170

    subject.private.release(7)
    subject.free(small)
    subject.empty_cache()
    assert reserved_mib(subject) == 50
    assert not subject.private.pools


def test_a_pool_serves_its_own() -> None:
    subject = allocator()
    subject.private.begin(7)
    subject.free(subject.malloc(100 * MIB))
    subject.malloc(100 * MIB)

    assert reserved_mib(subject) == 100
    assert [view.segment_pool_id for view in subject.segments()] == [7]


def test_only_the_captured_streams_are_diverted() -> None:
    subject = allocator()
    subject.private.begin(7, streams={1})
    subject.malloc(30 * MIB, stream=0)
    subject.malloc(30 * MIB, stream=1)

    assert sorted(view.segment_pool_id for view in subject.segments()) == [0, 7]


def test_out_of_memory_in_a_capture_does_not_empty_the_cache() -> None:
    """And the message counts the cached bytes of the pool as allocated."""
    subject = allocator(capacity=1000 * MIB)
    subject.free(subject.malloc(400 * MIB))
    subject.private.begin(7, capture=True)
    subject.free(subject.malloc(500 * MIB))

    with pytest.raises(OutOfMemory) as error:
        subject.malloc(600 * MIB)

    assert reserved_mib(subject) == 900
    assert subject.counters.num_alloc_retries == 0
    assert (
        "Of the allocated memory 500.00 MiB is allocated by PyTorch, with 500.00 MiB allocated in private pools "
        "(e.g., CUDA Graphs), and 400.00 MiB is reserved by PyTorch but unallocated."
    ) in str(error.value)


@pytest.mark.parametrize("version", VERSIONS)
def test_use_mem_pool_was_like_a_capture_once(version: str) -> None:
    """Up to 2.12 out of memory leaves the cache alone, an event is not looked at, and neither is empty_cache obeyed."""
    once = version in VERSIONS[: VERSIONS.index("2.13")]
    subject = allocator(version=version, capacity=100 * MIB)
    cached, shared = subject.malloc(40 * MIB), subject.malloc(10 * MIB)
    subject.record_stream(shared, 1)
    subject.free(cached)
    subject.free(shared)
    subject.private.begin(7)
    subject.malloc(30 * MIB)
    assert subject.counters.active_bytes == (40 if once else 30) * MIB

    subject.empty_cache()
    assert reserved_mib(subject) == (80 if once else 30)
    if once:
        with pytest.raises(OutOfMemory):
            subject.malloc(50 * MIB)
    else:
        subject.malloc(50 * MIB)


@pytest.mark.parametrize("version", VERSIONS[2:])
def test_a_pool_may_lend_when_memory_runs_out(version: str) -> None:
    """Since 2.8; since 2.11 before the cache is emptied."""
    subject = allocator(version=version, capacity=100 * MIB)
    subject.private.begin(7, use_on_oom=True)
    lent = subject.malloc(80 * MIB)
    address = lent.address
    subject.free(lent)
    subject.private.end(7)

    assert subject.malloc(50 * MIB).address == address
    assert subject.counters.num_alloc_retries == (version in {"2.8", "2.9", "2.10"})


def test_a_pool_may_refuse_to_split() -> None:
    subject = allocator()
    subject.private.begin(7, no_split=True)
    block = subject.malloc(2 * MIB)

    assert block.size == reserved_mib(subject) * MIB == 20 * MIB
