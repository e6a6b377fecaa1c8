"""From requested bytes to blocks and segments."""

from __future__ import annotations

import pytest

from memcalc.allocator.pytorch.rounding import block_size, segment_size, slot
from memcalc.allocator.pytorch.settings import parse_settings
from memcalc.allocator.pytorch.versions import parse_version
from tests.allocator.running import MIB, VERSIONS, allocated_mib, allocator, figures, reserved_mib


def rounded(size: int, divisions: str, version: str = "2.13") -> int:
    settings = parse_settings(f"roundup_power2_divisions:{divisions}", parse_version(version))
    return block_size(size, settings.roundup_power2_divisions)


@pytest.mark.parametrize(("size", "block"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_requests_become_whole_blocks_of_512_bytes(size: int, block: int) -> None:
    assert block_size(size) == block


@pytest.mark.parametrize(
    ("size", "block"),
    [
        (2049, 2560),  # just above 512·4; between 2048 and 4096 in steps of 512
        (2048, 2048),  # not above 512·4: rounded to 512
        (1025, 1536),  # the same: power-of-two steps would be 256
        (5000, 5120),  # steps of 4096/4 = 1024
        (1048577, 1310720),  # 1 MiB + 256 KiB
        (9 * MIB, 10485760),  # steps of 2 MiB: 10 MiB
        (17 * MIB, 20 * MIB),  # steps of 4 MiB
        (16 * MIB, 16 * MIB),  # a power of two stays
    ],
)
def test_four_steps_between_powers_of_two(size: int, block: int) -> None:
    assert rounded(size, "4") == block


def test_one_division_is_off() -> None:
    assert rounded(5000, "1") == 5120 == block_size(5000)  # 10 blocks of 512
    assert rounded(17 * MIB, "1") == 17 * MIB


@pytest.mark.parametrize("version", VERSIONS)
def test_where_the_open_slot_begins_depends_on_the_version(version: str) -> None:
    """Up to 2.9 `>` overwrites the last key itself: [256, 512) MiB then has 4 divisions, steps of 64 MiB."""
    old = parse_version(version).minor <= 9

    assert rounded(300 * MIB, "[256:1,>:4]", version) == (320 if old else 300) * MIB
    assert rounded(600 * MIB + 1, "[256:1,>:4]", version) == 640 * MIB  # steps of 128: 512, 640
    # Slot 1 is [2, 4) MiB, with steps of 512 KiB unless `>:0` has switched it off.
    assert rounded(2 * MIB + 1, "[2:4,>:0]", version) == (2097664 if old else 2621440)
    # The first key fills the slots below it, too: steps of 256 KiB in [1, 2) MiB.
    assert rounded(MIB + 1, "[2:4,>:0]", version) == 1310720


def test_keys_between_two_listed_ones_stay_off() -> None:
    assert rounded(5 * MIB, "[1:8,16:8]") == 5 * MIB  # [4, 8) MiB is not listed
    assert rounded(17 * MIB, "[1:8,16:8]") == 18 * MIB  # steps of 2 MiB


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, 0), (2 * MIB - 1, 0), (2 * MIB, 1), (256 * MIB, 8), (512 * MIB - 1, 8), (2**35, 15), (2**40, 15)],
)
def test_slots(size: int, expected: int) -> None:
    assert slot(size) == expected


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
    ],
)
def test_segments(block: int, segment: int) -> None:
    assert segment_size(block) == segment


def test_the_segment_is_chosen_by_the_rounded_size() -> None:
    """10,485,759 bytes are less than 10 MiB, but their block is not."""
    subject = allocator()
    subject.malloc(10485759)

    assert (allocated_mib(subject), reserved_mib(subject)) == (10, 10)


def test_a_large_segment_of_any_size() -> None:
    """19 MiB are counted as they are, though the driver gives 20 (granules of 2 MiB)."""
    subject = allocator("large_segment_size_mb:19", capacity=100 * MIB)
    subject.malloc(5 * MIB)

    assert figures(subject) == (5 * MIB, 19922944, 19922944 - 5 * MIB)
    assert subject.memory.driver.free_bytes == 80 * MIB


def test_the_lab_notebook_numbers() -> None:
    """A (1024,) fp32 tensor, then a (800,) one: 3200 bytes are 6.25 blocks, so 7."""
    subject = allocator()
    tensor = subject.malloc(4 * 1024)
    assert figures(subject)[:2] == (4096, 2097152)

    subject.free(tensor)
    assert figures(subject)[:2] == (0, 2097152)
    subject.empty_cache()
    assert figures(subject) == (0, 0, 0)

    subject.malloc(4 * 800)
    assert figures(subject)[:2] == (3584, 2097152)
