"""PYTORCH_CUDA_ALLOC_CONF: options, valid values, and rejected ones."""

from __future__ import annotations

import re

import pytest

from memcalc.allocator.pytorch.constants import LARGE_SEGMENT
from memcalc.allocator.pytorch.settings import Settings, known_options, parse_settings
from memcalc.allocator.pytorch.versions import Version, parse_version
from memcalc.allocator.sizes import UNLIMITED
from memcalc.errors import InputError
from tests.allocator.running import MIB

NEW, OLD = parse_version("2.13"), parse_version("2.9")


def test_no_options_are_the_defaults() -> None:
    assert parse_settings("", NEW) == Settings()
    assert (Settings().max_split_size, Settings().large_segment_size) == (UNLIMITED, LARGE_SEGMENT)


def test_all_that_count_at_once() -> None:
    """Spaces mean nothing, and neither does a comma at the end."""
    text = (
        " max_split_size_mb : 128, max_non_split_rounding_mb:64,garbage_collection_threshold:.8,"
        "roundup_power2_divisions:[1:2,2:4,>:8],expandable_segments:True,backend:native,"
        "per_process_memory_fraction:0.9,large_segment_size_mb:30,throw_on_cudamalloc_oom:False, "
    )

    assert parse_settings(text, NEW) == Settings(
        max_split_size=128 * MIB,
        max_non_split_rounding=64 * MIB,
        garbage_collection_threshold=0.8,
        roundup_power2_divisions=(2, 4, *[8] * 14),
        expandable_segments=True,
        memory_fraction=0.9,
        option_fraction=0.9,
        large_segment_size=30 * MIB,
    )


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("4", (4,) * 16),
        ("[]", (0,) * 16),
        ("[256:1,512:2,1024:4,>:8]", (*[1] * 9, 2, 4, *[8] * 5)),  # log2 of 256, 512, 1024 is 8, 9, 10
        ("[4:2,16:8]", (2, 2, 2, 0, 8, *[0] * 11)),
        ("[65536:2]", (2,) * 16),  # beyond the last slot, 32768
        ("[>:4]", (0, *[4] * 15)),
    ],
)
def test_divisions_fill_sixteen_slots(text: str, slots: tuple[int, ...]) -> None:
    assert parse_settings(f"roundup_power2_divisions:{text}", NEW).roundup_power2_divisions == slots


def test_up_to_2_9_the_open_slot_overwrites_the_last_key() -> None:
    slots = parse_settings("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", OLD).roundup_power2_divisions

    assert slots == (*[1] * 9, 2, *[8] * 6)


def test_the_large_segment_is_the_rounding_of_oversize_blocks() -> None:
    settings = parse_settings("large_segment_size_mb:12,max_split_size_mb:12", NEW)

    assert settings.max_non_split_rounding == settings.max_split_size == 12 * MIB


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "max_split_size_mb",
            "'max_split_size_mb' is not an allocator option. Write name:value pairs with commas between",
        ),
        ("max_split_size_mb:", "'max_split_size_mb:' is not an allocator option."),
        ("max_split_size_mb:abc", "max_split_size_mb = abc is invalid. The value must be a whole number."),
        ("max_split_size_mb:19", "max_split_size_mb = 19 is invalid. The value must be at least 20 in torch 2.13."),
        (
            "max_non_split_rounding_mb:19",
            "max_non_split_rounding_mb = 19 is invalid. The value must be at least 20 in torch 2.13.",
        ),
        (
            "max_split_size_mb:25,large_segment_size_mb:50",
            "max_split_size_mb = 25 is invalid. The value must be at least large_segment_size_mb, which is 50.",
        ),
        ("large_segment_size_mb:10", "large_segment_size_mb = 10 is invalid. The value must be more than 10."),
        (
            "garbage_collection_threshold:0",
            "garbage_collection_threshold = 0 is invalid. The value must be between 0 and 1, both excl",
        ),
        (
            "garbage_collection_threshold:1",
            "garbage_collection_threshold = 1 is invalid. The value must be between 0 and 1, both excl",
        ),
        ("garbage_collection_threshold:x", "garbage_collection_threshold = x is invalid. The value must be a number."),
        (
            "expandable_segments:true",
            "expandable_segments = true is invalid. The value must be True or False, with a capital letter.",
        ),
        (
            "per_process_memory_fraction:1.5",
            "per_process_memory_fraction = 1.5 is invalid. The value must be between 0 and 1.",
        ),
        ("roundup_power2_divisions:3", "roundup_power2_divisions = 3 is invalid. The value must be a power of two."),
        ("roundup_power2_divisions:0", "roundup_power2_divisions = 0 is invalid. The value must be a power of two."),
        (
            "roundup_power2_divisions:[1:3]",
            "roundup_power2_divisions = 3 is invalid. The value must be a power of two or 0.",
        ),
        (
            "roundup_power2_divisions:[3:4]",
            "a key of roundup_power2_divisions = 3 is invalid. The value must be a power of two.",
        ),
        (
            "roundup_power2_divisions:[1:4",
            "= [1:4 is invalid. The value must be a power of two, or a list such as [256:1,512:2,>:4].",
        ),
        ("backend:jemalloc", "backend = jemalloc is invalid. The value must be native or cudaMallocAsync."),
        ("backend:cudaMallocAsync", "backend is cudaMallocAsync: its pool belongs to the CUDA driver and is not doc"),
        (
            "max_split_size_mb:40,max_split_size_mb:50",
            "max_split_size_mb is set to 40 and to 50. Keep one of the two.",
        ),
        ("max_splitsize_mb:40", "torch 2.13 has no allocator option 'max_splitsize_mb'. Choose from backend, max_"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse_settings(text, NEW)


def test_the_least_split_size_was_larger_once() -> None:
    assert parse_settings("max_split_size_mb:20", NEW).max_split_size == 20 * MIB
    assert parse_settings("max_split_size_mb:21", OLD).max_split_size == 21 * MIB
    with pytest.raises(InputError, match=r"The value must be at least 21 in torch 2\.9\."):
        parse_settings("max_split_size_mb:20", OLD)


@pytest.mark.parametrize(
    ("option", "since"),
    [
        ("graph_capture_record_stream_reuse:True", 9),
        ("per_process_memory_fraction:0.5", 10),
        ("pinned_reserve_segment_size_mb:1", 10),
        ("large_segment_size_mb:30", 11),
        ("throw_on_cudamalloc_oom:True", 12),
        ("pinned_max_round_threshold_mb:1", 13),
        ("pinned_max_cached_size_mb:1", 13),
    ],
)
def test_options_come_with_releases(option: str, since: int) -> None:
    parse_settings(option, Version(2, since))
    name = option.partition(":")[0]
    with pytest.raises(
        InputError, match=rf"torch 2\.{since - 1} has no allocator option '{name}'. torch 2.{since} added the option"
    ):
        parse_settings(option, Version(2, since - 1))


def test_the_list_of_options_is_that_of_the_release() -> None:
    assert len(known_options(parse_version("2.6"))) == 10
    assert set(known_options(NEW)) - set(known_options(OLD)) == {
        "per_process_memory_fraction",
        "pinned_reserve_segment_size_mb",
        "large_segment_size_mb",
        "throw_on_cudamalloc_oom",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
    }


def test_what_has_no_effect_is_said() -> None:
    text = "pinned_use_background_threads:True,garbage_collection_threshold:0.5,max_non_split_rounding_mb:30"

    assert parse_settings(text, NEW).notes == (
        "pinned_use_background_threads has no effect: it is about host memory.",
        "garbage_collection_threshold has no effect: it needs a memory fraction below 1.",
        "max_non_split_rounding_mb has no effect: it needs max_split_size_mb.",
    )
    assert parse_settings("garbage_collection_threshold:0.5", NEW, memory_fraction=0.9).notes == ()


def test_a_fraction_set_in_the_program_overrules_the_option() -> None:
    settings = parse_settings("per_process_memory_fraction:0.5", NEW, memory_fraction=0.25)

    assert (settings.memory_fraction, settings.option_fraction) == (0.25, 0.5)
    with pytest.raises(
        InputError, match=r"the memory fraction = 2\.0 is invalid\. The value must be between 0 and 1\."
    ):
        parse_settings("", NEW, memory_fraction=2.0)


@pytest.mark.parametrize("text", ["2.13", "2.13.0", "2.13.0+cu130", "2.13.1a0"])
def test_versions_as_torch_writes_them(text: str) -> None:
    assert parse_version(text) == (2, 13)
    assert str(parse_version(text)) == "2.13"


@pytest.mark.parametrize("text", ["2.5.1", "2.16", "1.13", "3.0", "nightly", "2", "2.131"])
def test_other_versions_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=rf"the allocator of torch '{text}' is not modelled\. Use a version from 2\.6"):
        parse_version(text)
