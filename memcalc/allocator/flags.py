"""Parsing of settings as text, "name=value,name=value", for frameworks with flags or environment variables."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

from memcalc.allocator.sizes import MIB
from memcalc.errors import InputError
from memcalc.units import whole_number

LARGEST = 1e30  # limit of decimal numbers, so that they stay finite in bytes

Reader = Callable[[str, str], Any]  # takes name and value as given; raises InputError


def read_flags(text: str, known: Mapping[str, Reader], owner: str, prefix: str = "") -> dict[str, Any]:
    """Return values by name.

    Args:
        text: name=value or name:value pairs, separated by commas or blanks; "" for none. The shell word `export` may
            precede a pair.
        known: the parser of each flag.
        owner: the framework or component that owns the flags, for messages.
        prefix: an optional prefix of each name, for example "FLAGS_".

    Raises:
        InputError: for text that is not a pair, an unknown flag, an invalid value, or a flag given twice with different
            values.
    """
    given: dict[str, str] = {}
    for item in re.split(r"[,\s]+", text.strip()) if text.strip() else ():
        if item == "export":
            continue
        match = re.fullmatch(r"([^=:]+)[=:](.+)", item)
        if match is None:
            raise InputError(
                f"{item!r} is not a setting of {owner}.", "Write name=value pairs with commas between them."
            )
        name, value = match[1].removeprefix(prefix), match[2]
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {nearest[0]}?" if nearest else ""
            raise InputError(f"{owner} has no setting {match[1]!r}.{hint}", f"Choose from {', '.join(sorted(known))}.")
        if given.get(name, value) != value:
            raise InputError(f"{name} is set to {given[name]} and to {value}.", "Keep one of the two.")
        given[name] = value
    return {name: known[name](name, value) for name, value in given.items()}


def invalid_value(name: str, value: str, rule: str) -> InputError:
    """Return the error for a value that violates a rule."""
    return InputError(f"{name} = {value} is invalid.", f"The value must be {rule}.")


def megabytes(name: str, value: str) -> int:
    """Parse a whole number of MiB; return bytes."""
    found = whole_number(value)
    if found is None:
        raise invalid_value(name, value, "a whole number of MiB, 0 or more")
    return found * MIB


def size_in_bytes(name: str, value: str) -> int:
    """Parse a power of two, in bytes."""
    found = whole_number(value)
    if found is None or found.bit_count() != 1:
        raise invalid_value(name, value, "a power of two, in bytes")
    return found


def number(name: str, value: str) -> float:
    """Parse a number that stays finite in bytes."""
    try:
        found = float(value)
    except ValueError:
        raise invalid_value(name, value, "a number") from None
    if not abs(found) < LARGEST:  # no comparison holds for not-a-number
        raise invalid_value(name, value, f"a finite number below {LARGEST:g}")
    return found


def parse_fraction(name: str, value: str) -> float:
    """Parse a number from 0 to 1."""
    found = number(name, value)
    if not 0 <= found <= 1:
        raise invalid_value(name, value, "between 0 and 1")
    return found


def boolean(name: str, value: str) -> bool:
    """Parse true or false, in any case, or 1 or 0."""
    known = {"true": True, "1": True, "false": False, "0": False}
    if value.lower() not in known:
        raise invalid_value(name, value, "true or false")
    return known[value.lower()]


def one_of(*choices: str) -> Reader:
    """Return a parser that accepts one of several words."""

    def read(name: str, value: str) -> str:
        if value not in choices:
            raise invalid_value(name, value, " or ".join(choices))
        return value

    return read
