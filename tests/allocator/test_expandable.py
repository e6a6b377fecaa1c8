"""Segments that grow page by page."""

from __future__ import annotations

import pytest

from memcalc.allocator.pytorch.settings import Settings
from memcalc.errors import OutOfMemory
from tests.allocator.running import MIB, VERSIONS, allocator, figures, reserved_mib


@pytest.mark.parametrize("version", VERSIONS)
def test_the_worked_example(version: str) -> None:
    """Offsets in MiB in the large pool's segment, with pages of 20 MiB."""
    subject = allocator("expandable_segments:True", version)
    reserved = []

    def note() -> None:
        reserved.append(reserved_mib(subject))

    subject.malloc(512)
    note()  # 2: one page of the small pool
    three = subject.malloc(3 * MIB)
    note()  # 22: page 0, [0, 3) used
    eighteen = subject.malloc(18 * MIB)
    note()  # 42: 17 free at the end of page 0, 1 more is needed: page 1, [3, 21) used
    thirty = subject.malloc(30 * MIB)
    note()  # 62: 19 free, 11 more: page 2, [21, 51) used
    subject.free(eighteen)
    nineteen = subject.malloc(19 * MIB)
    note()  # 82: the hole of 18 is too small; 9 free at the end, page 3, [51, 70) used
    subject.free(thirty)  # hole [3, 51)
    sixty = subject.malloc(60 * MIB)
    note()  # 142: 10 free at the end, 50 more: pages 4 to 6, [70, 130) used
    subject.free(three)
    subject.empty_cache()
    note()  # 102: the hole [0, 51) has pages 0 and 1 in it
    subject.free(nineteen)
    subject.empty_cache()
    note()  # 82: the hole [40, 70) has page 2, and not all of page 3

    assert reserved == [2, 22, 42, 62, 82, 142, 102, 82]
    statistics = subject.statistics()
    assert statistics["segment.all.current"] == statistics["inactive_split.all.current"] == 0
    assert statistics["num_device_alloc"] == 6  # map calls, whatever the number of pages
    assert statistics["num_device_free"] == 2
    assert statistics["allocated_bytes.all.current"] == 512 + sixty.size


def test_a_rest_of_512_bytes_is_split_off() -> None:
    subject = allocator("expandable_segments:True")
    subject.malloc(20 * MIB - 512)

    assert figures(subject) == (20 * MIB - 512, 20 * MIB, 0)


def test_a_smaller_hole_is_preferred_to_the_growing_end() -> None:
    """Free: a hole of 15, and 14 at the end that can grow. Best fit alone would take the end for 13."""
    subject = allocator("expandable_segments:True")
    hole, _, _ = subject.malloc(15 * MIB), subject.malloc(5 * MIB), subject.malloc(6 * MIB)
    address = hole.address
    subject.free(hole)

    assert subject.malloc(13 * MIB).address == address
    assert reserved_mib(subject) == 40


def test_each_stream_and_pool_has_its_own_segment() -> None:
    subject = allocator("expandable_segments:True")
    for stream in (0, 1):
        subject.malloc(1, stream)
        subject.malloc(2 * MIB, stream)

    views = subject.segments()
    assert sorted((view.stream, view.segment_type, view.total_size // MIB) for view in views) == [
        (0, "large", 20),
        (0, "small", 2),
        (1, "large", 20),
        (1, "small", 2),
    ]
    assert all(view.is_expandable for view in views)


def test_a_hole_in_the_mapping_divides_the_snapshot() -> None:
    """Pages 1 and 2 freed to the driver: two contiguous mapped ranges of one segment."""
    subject = allocator("expandable_segments:True")
    first, middle, last = (subject.malloc(20 * MIB * pages) for pages in (1, 2, 1))
    subject.free(middle)
    subject.empty_cache()

    assert [(view.address - first.address, view.total_size) for view in subject.segments()] == [
        (0, 20 * MIB),
        (60 * MIB, 20 * MIB),
    ]
    subject.free(last)
    subject.free(first)
    subject.empty_cache()
    assert subject.segments() == ()
    assert not subject.default.large.segments


def test_unmapped_pages_are_filled_first() -> None:
    subject = allocator("expandable_segments:True")
    first, middle, _ = (subject.malloc(20 * MIB * pages) for pages in (1, 2, 1))
    subject.free(middle)
    subject.empty_cache()

    assert subject.malloc(30 * MIB).address == first.address + 20 * MIB
    assert reserved_mib(subject) == 80


def test_pages_make_do_where_a_new_segment_would_not_fit() -> None:
    """100 MiB: 60 and 40 cached in two blocks, then 90: without expandable segments a flush, with them nothing."""
    for conf, retries in (("", 1), ("expandable_segments:True", 0)):
        subject = allocator(conf, capacity=100 * MIB)
        for block in [subject.malloc(size * MIB) for size in (60, 40)]:
            subject.free(block)
        subject.malloc(90 * MIB)
        assert subject.counters.num_alloc_retries == retries


def test_out_of_pages() -> None:
    subject = allocator("expandable_segments:True", capacity=100 * MIB)
    subject.malloc(70 * MIB)  # 4 pages, 10 MiB free

    with pytest.raises(OutOfMemory, match=r"Tried to allocate 40\.00 MiB\. .* of which 20\.00 MiB is free\. "):
        subject.malloc(40 * MIB)  # would need 30 more, so 2 pages
    assert reserved_mib(subject) == 80


def test_switched_off_in_mid_run() -> None:
    """Blocks of the expandable segment are ignored from then on, and still merge and unmap when freed."""
    subject = allocator("expandable_segments:True")
    expandable = subject.malloc(20 * MIB)
    subject.free(expandable)
    subject.configure(Settings())

    other = subject.malloc(20 * MIB)
    assert other.address != expandable.address
    subject.free(other)
    assert subject.malloc(20 * MIB).address == other.address
    subject.empty_cache()
    assert reserved_mib(subject) == 20


def test_a_second_segment_only_where_the_first_has_no_room() -> None:
    """Addresses for 160 + 160/8 MiB are 9 pages of 20. Eight are mapped, the first two freed to the driver: 40 and 20 are left.

    50 MiB fit neither: a second segment. 40 do: the first one's hole.
    """
    subject = allocator("expandable_segments:True", capacity=160 * MIB)
    blocks = [subject.malloc(size * MIB) for size in (40, 60, 60)]
    assert blocks[0].segment.size == 180 * MIB
    subject.free(blocks[0])
    subject.empty_cache()
    with pytest.raises(OutOfMemory):
        subject.malloc(50 * MIB)
    assert len(subject.default.large.segments) == 2

    assert subject.malloc(40 * MIB).address == blocks[0].segment.address


def test_of_two_holes_that_could_grow_alike_the_smaller_one_is_taken() -> None:
    """One block of 10 MiB before an unmapped page of 20, one of 30 that cannot grow: for 5 MiB the smaller stays."""
    subject = allocator("expandable_segments:True")
    keep, gap, _, hole, _ = (subject.malloc(size * MIB) for size in (10, 30, 20, 30, 10))
    subject.free(gap)  # [10, 40): 10 on page 0, page 1
    subject.empty_cache()  # page 1 is freed to the driver: [10, 20) free, [20, 40) unmapped
    subject.free(hole)  # [60, 90) free

    assert subject.malloc(5 * MIB).address == keep.address + 10 * MIB
