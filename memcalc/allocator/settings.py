"""The allocator's settings, and how PYTORCH_CUDA_ALLOC_CONF is read.

Source: torch c10/cuda/CUDAAllocatorConfig.cpp (to 2.9), c10/core/AllocatorConfig.cpp (since).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memcalc.allocator.constants import LARGE_SEGMENT, MIB, ROUNDUP_SLOTS, UNLIMITED
from memcalc.allocator.options import WITHOUT_EFFECT, check_known
from memcalc.allocator.versions import Version
from memcalc.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What PYTORCH_CUDA_ALLOC_CONF and torch.cuda.set_per_process_memory_fraction set. Sizes in bytes."""

    max_split_size: int = UNLIMITED  # blocks from this size on are never split
    max_non_split_rounding: int = LARGE_SEGMENT  # by how much less such a block may exceed a request
    garbage_collection_threshold: float = 0.0  # share of the limit; 0 is off
    roundup_power2_divisions: tuple[int, ...] | None = None  # 16 slots; None is off
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT  # of segments for requests from 1 to 10 MiB
    memory_fraction: float = 1.0  # of the device's memory that may be reserved; 1 is no limit
    throw_on_cudamalloc_oom: bool = False
    notes: tuple[str, ...] = ()  # options that were accepted but have no effect


def parse_settings(text: str, version: Version, memory_fraction: float | None = None) -> Settings:
    """Reads "max_split_size_mb:128,expandable_segments:True".

    Args:
        text: the value of PYTORCH_CUDA_ALLOC_CONF; "" for none.
        version: the release whose rules hold.
        memory_fraction: as given to torch.cuda.set_per_process_memory_fraction, which overrules the option.

    Raises:
        InputError: for an option that the release does not know, a value that it refuses, an option given twice with
            different values, or a backend that is not modelled.
    """
    given: dict[str, str] = {}
    for name, value in _pairs(text):
        check_known(name, version)
        if given.get(name, value) != value:
            raise InputError(f"{name} is given as {given[name]} and as {value}.", "Give it once.")
        given[name] = value
    changes: dict[str, Any] = {}
    for name, value in given.items():
        if name in _READERS:
            field, read = _READERS[name]
            changes[field] = read(name, value, version)
    if memory_fraction is not None:
        changes["memory_fraction"] = _fraction("the memory fraction", str(memory_fraction), version)
    changes.pop("backend", None)
    settings = Settings(**changes)
    return replace(settings, notes=tuple(_notes(given, settings)))


def _pairs(text: str) -> list[tuple[str, str]]:
    """Names and values; commas inside brackets belong to the value, and spaces mean nothing."""
    text = text.replace(" ", "")
    pairs = []
    for item in re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", text):
        name, colon, value = item.partition(":")
        if not colon or not value:
            raise InputError(f"{item!r} is no allocator option.", "Write name:value pairs with commas between them.")
        pairs.append((name, value))
    return pairs


def _notes(given: dict[str, str], settings: Settings) -> list[str]:
    notes = [f"{name} has no effect: {WITHOUT_EFFECT[name]}." for name in given if name in WITHOUT_EFFECT]
    if settings.garbage_collection_threshold and settings.memory_fraction >= 1:
        notes.append("garbage_collection_threshold has no effect: it needs a memory fraction below 1.")
    if "max_non_split_rounding_mb" in given and settings.max_split_size == UNLIMITED:
        notes.append("max_non_split_rounding_mb has no effect: it needs max_split_size_mb.")
    return notes


def _refused(name: str, value: str, rule: str) -> InputError:
    return InputError(f"{name} is {value}.", f"It must be {rule}.")


def _whole(name: str, value: str) -> int:
    if not value.isdecimal():
        raise _refused(name, value, "a whole number")
    return int(value)


def _flag(name: str, value: str, _version: Version) -> bool:
    if value not in {"True", "False"}:
        raise _refused(name, value, "True or False, with a capital letter")
    return value == "True"


def _split_size(name: str, value: str, version: Version) -> int:
    least = version.smallest_split_mb
    if _whole(name, value) < least:
        raise _refused(name, value, f"at least {least} in torch {version}")
    return int(value) * MIB


def _large_segment(name: str, value: str, _version: Version) -> int:
    if _whole(name, value) <= 10:  # else a request just below 10 MiB would not fit its segment
        raise _refused(name, value, "more than 10")
    return int(value) * MIB


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise _refused(name, value, "a number") from None


def _threshold(name: str, value: str, _version: Version) -> float:
    if not 0 < _number(name, value) < 1:
        raise _refused(name, value, "between 0 and 1, both excluded")
    return float(value)


def _fraction(name: str, value: str, _version: Version) -> float:
    if not 0 <= _number(name, value) <= 1:
        raise _refused(name, value, "between 0 and 1")
    return float(value)


def _backend(name: str, value: str, _version: Version) -> None:
    if value == "cudaMallocAsync":
        raise InputError(
            f"{name} is {value}, whose pool belongs to the CUDA driver and is not documented.",
            "Only the native backend is modelled.",
        )
    if value != "native":
        raise _refused(name, value, "native or cudaMallocAsync")


def _power(name: str, value: str, *, or_zero: bool) -> int:
    number = _whole(name, value)
    if number & (number - 1) or (number == 0 and not or_zero):
        raise _refused(name, value, "a power of two" + " or 0" * or_zero)
    return number


def _divisions(name: str, value: str, version: Version) -> tuple[int, ...]:
    """The 16 slots of "4" or "[256:1,512:2,>:4]".

    The first key also fills the slots below it; keys between two listed ones stay 0.
    """
    if not value.startswith("["):
        return (_power(name, value, or_zero=False),) * ROUNDUP_SLOTS
    if not re.fullmatch(r"\[(?:[0-9>]+:[0-9]+,?)+\]", value):
        raise _refused(name, value, "a power of two, or a list such as [256:1,512:2,>:4]")
    slots = [0] * ROUNDUP_SLOTS
    last, first = 0, True
    for item in value.strip("[],").split(","):
        key, _, text = item.partition(":")
        steps = _power(name, text, or_zero=True)
        if key == ">":
            begin = last + version.open_slot_offset
            slots[begin:] = [steps] * (ROUNDUP_SLOTS - begin)
            continue
        last = min(_power(f"{name}, key", key, or_zero=False).bit_length() - 1, ROUNDUP_SLOTS - 1)
        if first:
            slots[:last] = [steps] * last
            first = False
        slots[last] = steps
    return tuple(slots)


_READERS: dict[str, tuple[str, Callable[[str, str, Version], Any]]] = {
    "backend": ("backend", _backend),
    "max_split_size_mb": ("max_split_size", _split_size),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _split_size),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "expandable_segments": ("expandable_segments", _flag),
    "per_process_memory_fraction": ("memory_fraction", _fraction),
    "large_segment_size_mb": ("large_segment_size", _large_segment),
    "throw_on_cudamalloc_oom": ("throw_on_cudamalloc_oom", _flag),
}
