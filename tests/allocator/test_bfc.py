"""TensorFlow's allocator: the worked example of its rules, its limits, and its last resorts."""

from __future__ import annotations

import pytest

from memcalc.allocator.driver import Driver
from memcalc.allocator.tensorflow.bfc import BfcAllocator, readable
from memcalc.allocator.tensorflow.settings import parse_settings, reserve
from memcalc.errors import InputError, OutOfMemory
from tests.allocator.running import MIB

GIB = 2**30


def allocator(options: str = "", capacity: int = 16 * GIB, limit: int | None = None) -> BfcAllocator:
    if limit is not None:
        options += f",per_process_gpu_memory_fraction={limit / capacity}"
    return BfcAllocator(parse_settings(options.strip(",")), Driver(capacity))


def test_growth_region_by_region() -> None:
    subject = allocator("allow_growth=true", limit=16 * GIB)

    def after(size: int) -> tuple[int, int]:
        subject.malloc(size)
        return subject.statistics()["bytes_in_use"], subject.statistics()["pool_bytes"] // MIB

    assert after(1) == (256, 2)
    assert after(3 * MIB) == (256 + 4 * MIB, 2 + 4)  # 4 < 2 x 3: not split
    assert after(3 * MIB) == (7340288, 2 + 4 + 8)  # 8 >= 2 x 3: split
    assert after(100 * MIB) == (141558016, 14 + 128)  # 128 - 100 < 128 and 128 < 200: not split
    assert after(60 * MIB) == (204472576, 142 + 128)  # 128 >= 120: split
    assert after(150 * MIB) == (472908032, 270 + 256)
    assert subject.statistics()["pool_bytes"] == 551550976


def test_without_growth_the_first_allocation_takes_the_whole_limit() -> None:
    subject = allocator()

    subject.malloc(1)

    # available less 1800 MiB, for a GPU without a named compute capability
    assert subject.statistics()["pool_bytes"] == subject.statistics()["bytes_limit"] == 16 * GIB - 1800 * MIB


@pytest.mark.parametrize(
    ("available", "major", "expected"),
    [(2 * GIB - 1, 9, 225), (2 * GIB, 6, 500), (GIB * 16, 7, 1050), (GIB * 80, 8, 1536), (GIB * 80, 9, 1800)],
)
def test_the_system_s_reserve(available: int, major: int, expected: int) -> None:
    assert reserve(available, major) == expected * MIB


def test_the_rest_is_split_off_from_128_mib_on() -> None:
    for rest, taken in ((128, 200), (127, 327)):
        subject = allocator("allow_growth=true", limit=16 * GIB)
        subject.free(subject.malloc((200 + rest) * MIB))
        chunk = subject.segments()[0].total_size // MIB  # a region of 512 MiB
        subject = allocator("allow_growth=false", limit=(200 + rest) * MIB)
        assert subject.malloc(200 * MIB).size == taken * MIB
        assert chunk == 512


def test_a_fragmentation_fraction_takes_its_place() -> None:
    subject = allocator("fragmentation_fraction=0.5", limit=320 * MIB)  # of 320 MiB: 160

    assert subject.malloc(200 * MIB).size == 320 * MIB


def test_free_regions_are_freed_to_the_device_before_it_fails() -> None:
    subject = allocator("allow_growth=true", limit=100 * MIB)
    subject.free(subject.malloc(40 * MIB))  # a region of 64
    subject.malloc(70 * MIB)

    assert subject.statistics()["pool_bytes"] == 100 * MIB
    assert subject.counters.num_device_free == 1

    subject = allocator("allow_growth=true,garbage_collection=false", limit=100 * MIB)
    subject.free(subject.malloc(40 * MIB))
    with pytest.raises(OutOfMemory):
        subject.malloc(70 * MIB)


def test_a_region_that_the_driver_refuses_is_made_smaller() -> None:
    subject = BfcAllocator(parse_settings("per_process_gpu_memory_fraction=1"), Driver(1000 * MIB, used=100 * MIB))
    subject.malloc(1)

    # 1000 MiB x 0.9f, rounded up to 256 bytes: 943718400 fits the 900 MiB that are free
    assert subject.statistics()["pool_bytes"] == 943718400 == 900 * MIB


def test_nothing_is_returned_by_emptying_a_cache() -> None:
    subject = allocator("allow_growth=true")
    subject.free(subject.malloc(MIB))

    subject.empty_cache()

    assert subject.statistics()["pool_bytes"] == 2 * MIB


def test_the_message() -> None:
    subject = allocator("allow_growth=true", limit=GIB)

    with pytest.raises(OutOfMemory) as error:
        subject.malloc(1331691500)

    assert str(error.value).startswith(
        "Allocator (GPU_0_bfc) ran out of memory trying to allocate 1.24GiB (rounded to 1331691520)"
    )


@pytest.mark.parametrize(
    ("size", "text"), [(512, "512B"), (1536, "1.50KiB"), (MIB, "1.00MiB"), (3 * 2**40, "3072.00GiB")]
)
def test_sizes_as_tensorflow_prints_them(size: int, text: str) -> None:
    assert readable(size) == text


def test_settings_are_known_by_their_variables_too() -> None:
    assert parse_settings("TF_FORCE_GPU_ALLOW_GROWTH=true").allow_growth
    assert parse_settings("XLA_PYTHON_CLIENT_MEM_FRACTION=.75").memory_fraction == 0.75
    with pytest.raises(InputError, match="another name of the same option sets True"):
        parse_settings("TF_FORCE_GPU_ALLOW_GROWTH=true,allow_growth=false")
    with pytest.raises(InputError, match=r"Choose from TF_ENABLE_GPU_GARBAGE_COLLECTION, .*allow_growth"):
        parse_settings("alow_growth=true")
