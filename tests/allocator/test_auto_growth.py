"""Paddle's auto_growth strategy: the worked examples of its rules, byte by byte."""

from __future__ import annotations

import pytest

from memcalc.allocator.driver import Driver
from memcalc.allocator.paddle.auto_growth import AutoGrowthAllocator
from memcalc.allocator.paddle.settings import parse_settings
from memcalc.errors import OutOfMemory
from tests.allocator.running import MIB


def allocator(flags: str = "", capacity: int | None = None) -> AutoGrowthAllocator:
    return AutoGrowthAllocator(parse_settings(flags, "auto_growth"), Driver(capacity))


def test_without_a_chunk_size_every_miss_fetches_just_what_it_needs() -> None:
    subject = allocator()

    blocks = [subject.malloc(size) for size in (1000, 3145729, 10 * MIB, 20 * MIB)]

    # 1000 -> 4 x 256; 3145729 = 3 MiB + 1 -> 3 MiB + 256
    assert [block.size for block in blocks] == [1024, 3145984, 10485760, 20971520]
    assert subject.statistics()["memory_allocated"] == 34604288
    assert subject.statistics()["memory_reserved"] == 34604288
    assert 1024 + 3145984 == 3147008  # reserved after the second


def test_chunks_are_used_from_behind() -> None:
    subject = allocator("FLAGS_auto_growth_chunk_size_in_mb=16")

    first = subject.malloc(1000)
    chunk = first.segment.address
    offsets = [first.address - chunk]
    offsets += [subject.malloc(size).address - chunk for size in (3145729, 10 * MIB)]
    last = subject.malloc(20 * MIB)

    # 16777216 - 1024; less 3145984; less 10485760
    assert offsets == [16776192, 13630208, 3144448]
    assert last.segment.size == 20971520
    assert subject.statistics()["memory_allocated"] == 34604288
    assert subject.statistics()["memory_reserved"] == 37748736 == 16 * MIB + 20 * MIB


def test_two_pools_with_memory_reserved_at_the_start() -> None:
    """Paddle's own test of its small and large pools."""
    subject = allocator(
        "FLAGS_small_pool_size_in_mb=1,FLAGS_small_pool_auto_growth_chunk_size_in_mb=2,"
        "FLAGS_large_pool_auto_growth_chunk_size_in_mb=16,FLAGS_small_pool_pre_alloc_in_mb=2,"
        "FLAGS_large_pool_pre_alloc_in_mb=20"
    )
    assert subject.statistics()["memory_reserved"] == 22 * MIB

    for _ in range(7):
        subject.malloc(MIB // 2)

    assert subject.statistics()["memory_allocated"] == 7 * MIB // 2  # four fill the first 2 MiB, three need a second
    assert subject.statistics()["memory_reserved"] == 24 * MIB


def test_freed_neighbors_merge_and_the_smallest_fit_is_taken() -> None:
    subject = allocator("FLAGS_auto_growth_chunk_size_in_mb=16")
    blocks = [subject.malloc(4 * MIB) for _ in range(4)]

    subject.free(blocks[1])
    subject.free(blocks[2])
    merged = subject.malloc(8 * MIB)

    assert merged.address == blocks[2].address  # 8 MiB from the lower of the two on: blocks lie from behind
    assert subject.statistics()["memory_reserved"] == 16 * MIB


def test_chunks_never_merge() -> None:
    subject = allocator()
    blocks = [subject.malloc(4 * MIB) for _ in range(2)]
    for block in blocks:
        subject.free(block)

    subject.malloc(8 * MIB)

    assert subject.statistics()["memory_reserved"] == 16 * MIB


@pytest.mark.parametrize(
    ("flags", "reserved"), [("", 12), ("FLAGS_free_idle_chunk=true", 8), ("FLAGS_free_when_no_cache_hit=true", 8)]
)
def test_idle_chunks_are_kept_unless_a_flag_says_otherwise(flags: str, reserved: int) -> None:
    subject = allocator(flags)
    subject.free(subject.malloc(4 * MIB))

    subject.malloc(8 * MIB)

    assert subject.statistics()["memory_reserved"] == reserved * MIB


def test_idle_chunks_are_freed_before_it_gives_up() -> None:
    subject = allocator(capacity=10 * MIB)
    subject.free(subject.malloc(4 * MIB))

    subject.malloc(8 * MIB)

    assert subject.statistics()["memory_reserved"] == 8 * MIB


def test_the_limit_is_exact_and_named_in_the_message() -> None:
    subject = allocator("FLAGS_gpu_memory_limit_mb=16", 100 * MIB)
    subject.malloc(16 * MIB)

    with pytest.raises(OutOfMemory) as error:
        subject.malloc(1)

    assert "Cannot allocate 256.000000B memory on GPU 0, 16.000000MB memory has been allocated" in str(error.value)
    assert "available memory is only 0.000000B" in str(error.value)
    assert "`FLAGS_gpu_memory_limit_mb` is 16" in str(error.value)


def test_small_chunks_share_the_driver_s_granules() -> None:
    subject = allocator()
    for _ in range(4096):
        subject.malloc(512)

    assert subject.memory.driver.capacity - subject.memory.driver.free_bytes == 2 * MIB
    assert subject.statistics()["memory_reserved"] == 4096 * 512


def test_streams_do_not_share_chunks() -> None:
    subject = allocator()
    subject.free(subject.malloc(4 * MIB, stream=0))

    subject.malloc(4 * MIB, stream=1)

    assert subject.statistics()["memory_reserved"] == 8 * MIB
