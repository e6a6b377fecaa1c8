"""Parsers of the allocator options' values, and their rules.

Source: torch c10/cuda/CUDAAllocatorConfig.cpp (to 2.9), c10/core/AllocatorConfig.cpp (since).
"""

from __future__ import annotations

import re

from memcalc.allocator.flags import invalid_value
from memcalc.allocator.pytorch.constants import MADE_TO_MEASURE, ROUNDUP_SLOTS
from memcalc.allocator.pytorch.versions import Version
from memcalc.allocator.sizes import MIB
from memcalc.errors import InputError
from memcalc.units import whole_number


def parse_int(name: str, value: str) -> int:
    """Parse a whole number."""
    found = whole_number(value)
    if found is None:
        raise invalid_value(name, value, "a whole number")
    return found


def flag(name: str, value: str, _version: Version) -> bool:
    """Parse True or False, with a capital letter."""
    if value not in {"True", "False"}:
        raise invalid_value(name, value, "True or False, with a capital letter")
    return value == "True"


def megabytes(name: str, value: str, _version: Version) -> int:
    """Parse a whole number of MiB; return bytes."""
    return parse_int(name, value) * MIB


def large_segment(name: str, value: str, _version: Version) -> int:
    """Parse a whole number of MiB, above the largest request it must hold (10 MiB); return bytes."""
    least = MADE_TO_MEASURE // MIB
    found = parse_int(name, value)
    if found <= least:
        raise invalid_value(name, value, f"more than {least}")
    return found * MIB


def threshold(name: str, value: str, _version: Version) -> float:
    """Parse a fraction between 0 and 1, both excluded."""
    if not 0 < _number(name, value) < 1:
        raise invalid_value(name, value, "between 0 and 1, both excluded")
    return float(value)


def fraction(name: str, value: str, _version: Version) -> float:
    """Parse a fraction from 0 to 1, both included."""
    if not 0 <= _number(name, value) <= 1:
        raise invalid_value(name, value, "between 0 and 1")
    return float(value)


def backend(name: str, value: str, _version: Version) -> None:
    """Check that the backend is the native one, or raise an error."""
    if value == "cudaMallocAsync":
        raise InputError(
            f"{name} is {value}: its pool belongs to the CUDA driver and is not documented.",
            "Only the native backend is modelled.",
        )
    if value != "native":
        raise invalid_value(name, value, "native or cudaMallocAsync")


def divisions(name: str, value: str, version: Version) -> tuple[int, ...]:
    """Return the 16 slots of "4" or "[256:1,512:2,>:4]".

    The first key also fills the slots below it; slots between two listed keys stay 0.
    """
    if not value.startswith("["):
        return (_power(name, value, or_zero=False),) * ROUNDUP_SLOTS
    if not re.fullmatch(r"\[(?:[0-9>]+:[0-9]+,?)*\]", value):
        raise invalid_value(name, value, "a power of two, or a list such as [256:1,512:2,>:4]")
    slots = [0] * ROUNDUP_SLOTS
    last, first = 0, True
    for key, text in re.findall(r"([0-9>]+):([0-9]+)", value):
        steps = _power(name, text, or_zero=True)
        if key == ">":
            begin = last + version.open_slot_offset
            slots[begin:] = [steps] * (ROUNDUP_SLOTS - begin)
            continue
        last = min(_power(f"a key of {name}", key, or_zero=False).bit_length() - 1, ROUNDUP_SLOTS - 1)
        if first:
            slots[:last] = [steps] * last
            first = False
        slots[last] = steps
    return tuple(slots)


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise invalid_value(name, value, "a number") from None


def _power(name: str, value: str, *, or_zero: bool) -> int:
    number = parse_int(name, value)
    if number & (number - 1) or (number == 0 and not or_zero):
        raise invalid_value(name, value, "a power of two" + " or 0" * or_zero)
    return number
