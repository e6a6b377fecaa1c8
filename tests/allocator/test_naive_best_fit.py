"""Paddle's naive_best_fit strategy: the pool up front, its arithmetic, and what goes past it."""

from __future__ import annotations

import pytest

from memcalc.allocator.driver import Driver
from memcalc.allocator.paddle.naive_best_fit import NaiveBestFitAllocator
from memcalc.allocator.paddle.settings import parse_settings
from memcalc.errors import OutOfMemory
from tests.allocator.running import MIB


def allocator(flags: str = "", capacity: int = 10_000 * MIB, used: int = 0) -> NaiveBestFitAllocator:
    return NaiveBestFitAllocator(parse_settings(flags, "naive_best_fit"), Driver(capacity, used))


def test_the_first_chunk_is_92_percent_of_what_is_available() -> None:
    free = 85520809984
    subject = allocator(capacity=free)
    assert free - subject.memory.available == 4276040448  # 5 % in single precision
    assert subject.memory.available == 81244769536

    subject.malloc(1)

    assert subject.statistics()["memory_reserved"] == 74745189329  # 0.92 as a float is 0.9200000166893005
    assert subject.max_chunk == 74745189329


def test_every_block_carries_its_descriptor() -> None:
    subject = allocator()

    assert [subject.malloc(size).size for size in (1, 192, 193, 1000)] == [256, 256, 512, 1280]  # r256(n + 64)


def test_blocks_are_taken_from_the_front() -> None:
    subject = allocator("FLAGS_initial_gpu_memory_in_mb=16")

    first, second = subject.malloc(1000), subject.malloc(1000)

    assert (first.address, second.address) == (first.segment.address, first.segment.address + 1280)
    subject.free(first)
    subject.free(second)
    assert subject.malloc(2000).address == first.address  # merged


def test_what_is_larger_than_a_chunk_goes_straight_to_the_device_and_back() -> None:
    subject = allocator("FLAGS_initial_gpu_memory_in_mb=16,FLAGS_reallocate_gpu_memory_in_mb=8")
    assert subject.max_chunk == 16 * MIB

    huge = subject.malloc(16 * MIB)  # with its descriptor it is more than 16 MiB
    assert subject.statistics()["memory_reserved"] == 16 * MIB + 256
    subject.free(huge)

    assert subject.statistics()["memory_reserved"] == 0
    assert subject.statistics()["num_device_free"] == 1


def test_later_chunks_are_of_the_other_size() -> None:
    subject = allocator("FLAGS_initial_gpu_memory_in_mb=16,FLAGS_reallocate_gpu_memory_in_mb=8")
    subject.malloc(15 * MIB)
    subject.malloc(2 * MIB)
    assert subject.statistics()["memory_reserved"] == 24 * MIB

    subject.malloc(12 * MIB)  # more than 8 MiB: a chunk of its own size

    assert subject.statistics()["memory_reserved"] == 24 * MIB + 12 * MIB + 256


def test_a_fraction_of_nothing_means_a_call_of_the_device_each_time() -> None:
    subject = allocator("FLAGS_fraction_of_gpu_memory_to_use=0")
    for _ in range(5):
        subject.free(subject.malloc(MIB))

    statistics = subject.statistics()
    assert (statistics["num_device_alloc"], statistics["num_device_free"]) == (5, 5)
    assert statistics["max_memory_reserved"] == MIB + 256


def test_the_limit_clips_the_pool() -> None:
    subject = allocator("FLAGS_gpu_memory_limit_mb=1000")
    subject.malloc(1)

    # 1000 MiB less 5 %, of which 92 %
    assert subject.statistics()["memory_reserved"] == pytest.approx(0.95 * 0.92 * 1000 * MIB, rel=1e-7)


def test_a_request_beyond_pool_and_free_memory_fails() -> None:
    subject = allocator(capacity=1000 * MIB)
    subject.malloc(800 * MIB)

    with pytest.raises(OutOfMemory, match=r"Out of memory error on GPU 0. Cannot allocate 300.000244MB"):
        subject.malloc(300 * MIB)
