"""The allocator's settings, and the parser of PYTORCH_CUDA_ALLOC_CONF.

Source: torch c10/cuda/CUDAAllocatorConfig.cpp (to 2.9), c10/core/AllocatorConfig.cpp (since).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memcalc.allocator.flags import invalid_value
from memcalc.allocator.pytorch import values
from memcalc.allocator.pytorch.constants import LARGE_SEGMENT
from memcalc.allocator.pytorch.versions import OLDEST, Version
from memcalc.allocator.sizes import UNLIMITED
from memcalc.errors import InputError

SPLIT_SIZES = ("max_split_size_mb", "max_non_split_rounding_mb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of PYTORCH_CUDA_ALLOC_CONF and torch.cuda.set_per_process_memory_fraction. Sizes in bytes."""

    max_split_size: int = UNLIMITED  # blocks of this size and larger are never split
    max_non_split_rounding: int = LARGE_SEGMENT  # such a block may exceed a request by less than this
    garbage_collection_threshold: float = 0.0  # fraction of the limit; 0 is off
    roundup_power2_divisions: tuple[int, ...] | None = None  # 16 slots; None is off
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT  # of segments for requests from 1 to 10 MiB
    memory_fraction: float = 1.0  # fraction of the device's memory that may be reserved; 1 is no limit
    throw_on_cudamalloc_oom: bool = False
    option_fraction: float = 1.0  # per_process_memory_fraction as an option, which throw_on_cudamalloc_oom uses
    notes: tuple[str, ...] = ()  # options that were accepted but have no effect


# Each option with an effect: the field of Settings, and its parser.
READERS: dict[str, tuple[str, Callable[[str, str, Version], Any]]] = {
    "max_split_size_mb": ("max_split_size", values.megabytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", values.megabytes),
    "garbage_collection_threshold": ("garbage_collection_threshold", values.threshold),
    "roundup_power2_divisions": ("roundup_power2_divisions", values.divisions),
    "expandable_segments": ("expandable_segments", values.flag),
    "per_process_memory_fraction": ("memory_fraction", values.fraction),
    "large_segment_size_mb": ("large_segment_size", values.large_segment),
    "throw_on_cudamalloc_oom": ("throw_on_cudamalloc_oom", values.flag),
}


def parse_settings(text: str, version: Version, memory_fraction: float | None = None) -> Settings:
    """Parse "max_split_size_mb:128,expandable_segments:True".

    Args:
        text: the value of PYTORCH_CUDA_ALLOC_CONF; "" for none.
        version: the PyTorch version.
        memory_fraction: as given to torch.cuda.set_per_process_memory_fraction, which overrides the option.

    Raises:
        InputError: for an option that the version does not know, an invalid value, an option given twice with different
            values, or a backend that is not modelled.
    """
    given = _pairs(text, version)
    changes: dict[str, Any] = {
        field: read(name, given[name], version) for name, (field, read) in READERS.items() if name in given
    }
    if "backend" in given:
        values.backend("backend", given["backend"], version)
    _check_split_sizes(given, version)
    if "large_segment_size" in changes:
        changes.setdefault("max_non_split_rounding", changes["large_segment_size"])
    if "memory_fraction" in changes:
        changes["option_fraction"] = changes["memory_fraction"]
    if memory_fraction is not None:
        changes["memory_fraction"] = values.fraction("the memory fraction", str(memory_fraction), version)
    settings = Settings(**changes)
    return replace(settings, notes=tuple(_notes(given, settings)))


def _pairs(text: str, version: Version) -> dict[str, str]:
    """Return values by name; commas inside brackets belong to the value, and spaces are ignored."""
    given: dict[str, str] = {}
    for item in re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", text.replace(" ", "")):
        name, colon, value = item.partition(":")
        if not colon or not value:
            raise InputError(
                f"{item!r} is not an allocator option.", "Write name:value pairs with commas between them."
            )
        check_known(name, version)
        if given.get(name, value) != value:
            raise InputError(f"{name} is set to {given[name]} and to {value}.", "Keep one of the two.")
        given[name] = value
    return given


def _check_split_sizes(given: dict[str, str], version: Version) -> None:
    """Check that both split sizes are at least large_segment_size_mb, or the version's fixed bound without it."""
    large = given.get("large_segment_size_mb")
    for name in SPLIT_SIZES:
        if name not in given:
            continue
        if large is not None and int(given[name]) < int(large):
            raise invalid_value(name, given[name], f"at least large_segment_size_mb, which is {large}")
        if large is None and int(given[name]) < version.smallest_split_mb:
            raise invalid_value(name, given[name], f"at least {version.smallest_split_mb} in torch {version}")


def _notes(given: dict[str, str], settings: Settings) -> list[str]:
    notes = [f"{name} has no effect: {WITHOUT_EFFECT[name]}." for name in given if name in WITHOUT_EFFECT]
    if settings.garbage_collection_threshold and settings.memory_fraction >= 1:
        notes.append("garbage_collection_threshold has no effect: it needs a memory fraction below 1.")
    if "max_non_split_rounding_mb" in given and settings.max_split_size == UNLIMITED:
        notes.append("max_non_split_rounding_mb has no effect: it needs max_split_size_mb.")
    return notes


# The options of PYTORCH_CUDA_ALLOC_CONF, and the version that introduced each.
# Source: torch c10/cuda/CUDAAllocatorConfig.cpp (to 2.9), c10/core/AllocatorConfig.cpp and CUDAAllocatorConfig.cpp
# (since).

# The minor version of torch 2 that introduced the option; OLDEST for options of the oldest version modelled.
SINCE: dict[str, int] = {
    "backend": OLDEST,
    "max_split_size_mb": OLDEST,
    "max_non_split_rounding_mb": OLDEST,
    "garbage_collection_threshold": OLDEST,
    "roundup_power2_divisions": OLDEST,
    "expandable_segments": OLDEST,
    "release_lock_on_cudamalloc": OLDEST,
    "pinned_use_cuda_host_register": OLDEST,
    "pinned_num_register_threads": OLDEST,
    "pinned_use_background_threads": OLDEST,
    "graph_capture_record_stream_reuse": 9,
    "per_process_memory_fraction": 10,
    "pinned_reserve_segment_size_mb": 10,
    "large_segment_size_mb": 11,
    "throw_on_cudamalloc_oom": 12,
    "pinned_max_round_threshold_mb": 13,
    "pinned_max_cached_size_mb": 13,
}

# Options that PyTorch accepts and checks, but that have no effect on device memory without captured graphs.
WITHOUT_EFFECT = {
    "release_lock_on_cudamalloc": "it only lets other threads run during cudaMalloc",
    "graph_capture_record_stream_reuse": "reuse during graph capture is not modelled",
    "pinned_use_cuda_host_register": "it is about host memory",
    "pinned_num_register_threads": "it is about host memory",
    "pinned_use_background_threads": "it is about host memory",
    "pinned_reserve_segment_size_mb": "it is about host memory",
    "pinned_max_round_threshold_mb": "it is about host memory",
    "pinned_max_cached_size_mb": "it is about host memory",
}


def known_options(version: Version) -> tuple[str, ...]:
    """Return the options that a version accepts, in order of introduction."""
    return tuple(name for name, since in SINCE.items() if since <= version.minor)


def check_known(name: str, version: Version) -> None:
    """Reject an option that a version does not know, as PyTorch does.

    Raises:
        InputError: with the known options.
    """
    since = SINCE.get(name)
    if since is not None and since <= version.minor:
        return
    history = "" if since is None else f" torch 2.{since} added the option."
    raise InputError(
        f"torch {version} has no allocator option {name!r}.{history}",
        f"Choose from {', '.join(known_options(version))}.",
    )
