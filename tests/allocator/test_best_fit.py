"""Which free block serves a request, what is split off, and what merges again."""

from __future__ import annotations

import pytest

from tests.allocator.running import MIB, VERSIONS, allocated_mib, allocator, figures, reserved_mib


@pytest.mark.parametrize("version", VERSIONS)
def test_which_of_three_equal_blocks_is_taken(version: str) -> None:
    """Five blocks A to E of 12 MiB carved out of one segment of 60; A, C and E are free.

    By address, the first is A at 0. By block number it is E at 48: splitting makes a new object for the front, and the
    rest, down to E, is still the segment's first. By segment and address it is A again. After the second request
    (10 MiB, split: the rests are 2 MiB) the first is freed and merges back to 12 MiB.
    """
    subject = allocator(version=version)
    whole = subject.malloc(60 * MIB)
    subject.free(whole)
    blocks = [subject.malloc(12 * MIB) for _ in range(5)]
    start = blocks[0].address
    assert [(block.address - start) // MIB for block in blocks] == [0, 12, 24, 36, 48]
    for block in blocks[::2]:
        subject.free(block)

    first = subject.malloc(10 * MIB)
    second = subject.malloc(10 * MIB)
    offsets = [(first.address - start) // MIB, (second.address - start) // MIB]
    subject.free(first)
    offsets.append((subject.malloc(12 * MIB).address - start) // MIB)

    assert offsets == ([48, 0, 24] if version == "2.12" else [0, 24, 0])


@pytest.mark.parametrize("version", VERSIONS)
def test_which_of_two_equal_segments_is_taken(version: str) -> None:
    """The younger one lies below the older one: up to 2.11 the lower one, then the older one."""
    subject = allocator(version=version, capacity=1000 * MIB)
    older, younger = subject.malloc(30 * MIB), subject.malloc(30 * MIB)
    lower = younger.address
    assert older.address - lower == 32 * MIB
    subject.free(older)
    subject.free(younger)

    offset = (subject.malloc(30 * MIB).address - lower) // MIB

    assert offset == (0 if version in VERSIONS[: VERSIONS.index("2.12")] else 32)


def test_segments_fill_one_after_the_other() -> None:
    """Worked A: cumulative figures on a fresh device."""
    subject = allocator()
    figures_after = []
    for size in (1, 513, MIB, 1048577, 10485759, 10485760, 12582913):
        subject.malloc(size)
        figures_after.append(figures(subject))

    small_rest = 2 * MIB - 1050112
    assert figures_after == [
        (512, 2 * MIB, 2 * MIB - 512),
        (512 + 1024, 2 * MIB, 2 * MIB - 1536),
        (1536 + MIB, 2 * MIB, small_rest),  # 1050112, in the same segment
        # 1049088 out of a new segment of 20 MiB; what is left of both is inactive.
        (2099200, 23068672, 20969472),
        # 10 MiB out of that segment: 10 MiB - 512 of it are left.
        (12584960, 23068672, 20969472 - 10 * MIB),
        # Another 10 MiB do not fit what is left of it: a new segment, made to measure.
        (12584960 + 10 * MIB, 33554432, 20969472 - 10 * MIB),
        # 12 MiB + 512 in a new segment of 14 MiB; the remainder is above 1 MiB.
        (35654144, 48234496, 12580352),
    ]
    assert 1050112 + 1049088 == 2099200
    large_rest = 20 * MIB - 1049088 - 10 * MIB
    assert large_rest == 9436672 < 10 * MIB
    assert small_rest + large_rest + (14 * MIB - (12 * MIB + 512)) == 12580352


def test_a_rest_of_one_mebibyte_is_not_split_off() -> None:
    """Worked B: 20 MiB cached. For 19 MiB the rest is not above 1 MiB; for 512 bytes less it is."""
    subject = allocator()
    block = subject.malloc(20 * MIB)
    subject.free(block)
    block = subject.malloc(19 * MIB)
    assert figures(subject) == (20971520, 20 * MIB, 0)
    assert subject.counters.requested_bytes == 19 * MIB

    subject.free(block)
    subject.malloc(19 * MIB - 512)
    assert figures(subject) == (19922432, 20 * MIB, 1049088)


def test_a_new_segment_may_be_allocated_as_one_block() -> None:
    """Worked C: 11.5 MiB need a segment of 12; its remainder is too small to be split off."""
    subject = allocator()
    subject.malloc(11 * MIB + MIB // 2)

    assert figures(subject) == (12582912, 12582912, 0)
    assert subject.counters.requested_bytes == 12058624


@pytest.mark.parametrize("version", VERSIONS)
def test_oversize_blocks_are_kept_for_oversize_requests(version: str) -> None:
    """Worked D, max_split_size_mb:64."""
    subject = allocator("max_split_size_mb:64", version)
    block = subject.malloc(100 * MIB)
    subject.free(block)
    assert reserved_mib(subject) == 100

    subject.malloc(30 * MIB)  # 100 is oversize and 30 is not: a segment of its own
    assert (allocated_mib(subject), reserved_mib(subject)) == (30, 130)

    block = subject.malloc(81 * MIB)  # the 100 whole, for 100 < 81 + 20
    assert (allocated_mib(subject), reserved_mib(subject)) == (130, 130)
    subject.free(block)

    block = subject.malloc(80 * MIB)  # not the 100, for 100 is not less than 80 + 20
    assert (allocated_mib(subject), reserved_mib(subject)) == (30 + 80, 210)
    subject.free(block)

    subject.malloc(79 * MIB)  # the 80 just freed, unsplit
    assert (allocated_mib(subject), reserved_mib(subject)) == (30 + 80, 210)
    statistics = subject.statistics()
    assert statistics["oversize_segments.current"] == 2  # 100 and 80
    assert statistics["oversize_allocations.allocated"] == 4  # 100, 100 (for 81), 80, 80 (for 79)
    assert statistics["oversize_allocations.current"] == 1
    assert statistics["max_split_size"] == 64 * MIB


def test_an_oversize_request_gets_a_segment_unsplit() -> None:
    """Worked D, its last request on a fresh device: 79 MiB need a segment of 80, which is not split."""
    subject = allocator("max_split_size_mb:64")
    subject.malloc(79 * MIB)

    assert (allocated_mib(subject), reserved_mib(subject)) == (80, 80)


def test_streams_share_no_free_blocks() -> None:
    subject = allocator()
    subject.free(subject.malloc(30 * MIB, stream=0))
    subject.malloc(30 * MIB, stream=1)
    assert reserved_mib(subject) == 60

    subject.malloc(30 * MIB, stream=0)
    assert reserved_mib(subject) == 60


def test_neighbors_merge_in_any_order_of_frees() -> None:
    """Three blocks of 4 MiB and a rest of 8 in one segment: whole again whatever is freed last."""
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)):
        subject = allocator()
        blocks = [subject.malloc(4 * MIB) for _ in range(3)]
        for at in order:
            subject.free(blocks[at])
        assert figures(subject) == (0, 20 * MIB, 0)
        assert subject.statistics()["inactive_split.all.current"] == 0
        assert subject.malloc(20 * MIB).size == 20 * MIB
