"""Cached memory freed to the driver: all of it, just enough, or the oldest of it."""

from __future__ import annotations

import pytest

from memcalc.errors import OutOfMemory
from tests.allocator.running import MIB, VERSIONS, allocated_mib, allocator, reserved_mib


@pytest.mark.parametrize("version", VERSIONS)
def test_a_failing_driver_makes_the_cache_go(version: str) -> None:
    """1000 MiB, three times 300, two of them freed. 500 fit after the flush: 300 + 500. Another 500 do not."""
    subject = allocator(version=version, capacity=1000 * MIB)
    blocks = [subject.malloc(300 * MIB) for _ in range(3)]
    for block in blocks[:2]:
        subject.free(block)

    subject.malloc(500 * MIB)
    assert reserved_mib(subject) == 800
    assert subject.counters.num_alloc_retries == 1
    assert subject.counters.num_ooms == 0
    assert subject.counters.num_device_free == 2
    assert subject.counters.reserved.peak == 900 * MIB  # it fell to 300 before it rose to 800

    with pytest.raises(OutOfMemory):
        subject.malloc(500 * MIB)
    assert (subject.counters.num_alloc_retries, subject.counters.num_ooms) == (2, 1)


def test_a_split_segment_is_never_released() -> None:
    """A byte that is alive holds 20 MiB; the segment of nothing else goes."""
    subject = allocator()
    kept, gone = subject.malloc(2 * MIB), subject.malloc(18 * MIB)
    alone = subject.malloc(40 * MIB)
    subject.free(gone)
    subject.free(alone)
    subject.empty_cache()

    assert (allocated_mib(subject), reserved_mib(subject)) == (2, 20)
    subject.free(kept)
    subject.empty_cache()
    assert reserved_mib(subject) == 0


def test_garbage_is_collected_by_age() -> None:
    """1000 MiB, fraction 0.8, threshold 0.5: 100, 150, 200, the first two freed, then 160.

    450 reserved are above 0.5 · 800 = 400. Both free blocks have seen one search, which is the average: both go in one
    round, though 100 would have been enough. 200 + 160 remain.
    """
    subject = allocator("garbage_collection_threshold:0.5", capacity=1000 * MIB, fraction=0.8)
    blocks = [subject.malloc(size * MIB) for size in (100, 150, 200)]
    for block in blocks[:2]:
        subject.free(block)
    subject.malloc(160 * MIB)

    assert reserved_mib(subject) == 360
    assert subject.counters.num_device_free == 2
    assert subject.counters.num_alloc_retries == 0


def test_younger_garbage_stays() -> None:
    """Ages 3 and 1: the average is 2, and releasing the older 100 is enough for 410 - 400."""
    subject = allocator("garbage_collection_threshold:0.5", capacity=1000 * MIB, fraction=0.8)
    old, young, _ = (subject.malloc(size * MIB) for size in (100, 110, 200))
    subject.free(old)
    for _ in range(2):  # two searches of the large pool that the cache can serve
        subject.free(subject.malloc(90 * MIB))
    assert subject.default.large.searches == 5
    subject.free(young)
    subject.free(subject.malloc(95 * MIB))  # 100 again, younger than it was
    subject.malloc(160 * MIB)

    assert reserved_mib(subject) == 200 + 160 + 100


def test_garbage_collection_needs_a_fraction() -> None:
    subject = allocator("garbage_collection_threshold:0.1", capacity=1000 * MIB)
    subject.free(subject.malloc(500 * MIB))
    subject.malloc(20 * MIB)
    subject.malloc(490 * MIB)

    assert reserved_mib(subject) == 500 + 490
    assert subject.settings.notes == (
        "garbage_collection_threshold has no effect: it needs a memory fraction below 1.",
    )


def test_oversize_blocks_go_before_the_whole_cache() -> None:
    """max_split_size_mb:64, 1000 MiB: 400 and 300 cached, 250 in small change; 500 need the 400 and the 300 only."""
    subject = allocator("max_split_size_mb:64", capacity=1000 * MIB)
    large = [subject.malloc(size * MIB) for size in (400, 300)]
    small = [subject.malloc(50 * MIB) for _ in range(5)]
    for block in large + small:
        subject.free(block)
    subject.malloc(500 * MIB)

    assert reserved_mib(subject) == 500 + 250
    assert (subject.counters.num_device_free, subject.counters.num_alloc_retries) == (2, 0)


def test_the_smallest_sufficient_oversize_block_goes() -> None:
    """For 100 MiB one of 130 is freed (130 is not less than 100 + 20, so it cannot serve), and the 300 stay."""
    subject = allocator("max_split_size_mb:64", capacity=470 * MIB)
    for block in [subject.malloc(size * MIB) for size in (300, 130)]:
        subject.free(block)
    subject.malloc(100 * MIB)

    assert reserved_mib(subject) == 300 + 100


def test_segments_released_unnecessarily_stay_released() -> None:
    """100 oversize MiB do not suffice for 500; then all goes, and it is a retry."""
    subject = allocator("max_split_size_mb:64", capacity=520 * MIB)
    for block in [subject.malloc(size * MIB) for size in (100, 50)]:
        subject.free(block)
    subject.malloc(500 * MIB)

    assert reserved_mib(subject) == 500
    assert (subject.counters.num_device_free, subject.counters.num_alloc_retries) == (2, 1)


def test_the_limit_bounds_segments() -> None:
    """Half of 1000 MiB: 480 + 20 are 500, which may be; 500 + 2 may not, though the driver has it."""
    subject = allocator(capacity=1000 * MIB, fraction=0.5)
    subject.malloc(480 * MIB)
    subject.malloc(2 * MIB)
    with pytest.raises(OutOfMemory, match=r"500\.00 MiB allowed; "):
        subject.malloc(1)

    assert reserved_mib(subject) == 500


def test_the_limit_is_rounded_since_2_13() -> None:
    """0.7 of 700 MiB is 513802239.99999994 in floating point: 490 MiB fit only where it is rounded."""
    assert 0.7 * 700 * MIB < 490 * MIB
    assert allocator("", "2.12", 700 * MIB, 0.7).memory.limit == 490 * MIB - 1
    assert allocator("", "2.13", 700 * MIB, 0.7).memory.limit == 490 * MIB


def test_a_fraction_of_one_is_no_limit() -> None:
    subject = allocator(capacity=1000 * MIB, fraction=1.0)

    assert subject.memory.limit is None


def test_oversize_blocks_go_until_they_suffice() -> None:
    """For 200 MiB the larger two of 100 are exactly enough; 64 and 10 stay."""
    subject = allocator("max_split_size_mb:64", capacity=274 * MIB)
    for block in [subject.malloc(size * MIB) for size in (64, 100, 100, 10)]:
        subject.free(block)
    subject.malloc(200 * MIB)

    assert reserved_mib(subject) == 64 + 10 + 200
    assert (subject.counters.num_device_free, subject.counters.num_alloc_retries) == (2, 0)
