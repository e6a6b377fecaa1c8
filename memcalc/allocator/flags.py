"""Settings given as text, "name=value,name=value", for frameworks whose settings are flags or variables."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

from memcalc.allocator.sizes import MIB
from memcalc.errors import InputError
from memcalc.units import whole_number

LARGEST = 1e30  # of a number with decimals

Reader = Callable[[str, str], Any]  # name and value as given; raises InputError


def read_flags(text: str, known: Mapping[str, Reader], owner: str, prefix: str = "") -> dict[str, Any]:
    """Values by name.

    Args:
        text: name=value or name:value pairs, with commas or blanks between them; "" for none. The word `export` of a
            shell may stand before a pair.
        known: what reads each flag.
        owner: whose flags they are, for messages.
        prefix: what may stand before each name, such as "FLAGS_".

    Raises:
        InputError: for what is no pair, a flag that is not known, a value that it refuses, or a flag that is given
            twice with different values.
    """
    given: dict[str, str] = {}
    for item in re.split(r"[,\s]+", text.strip()) if text.strip() else ():
        if item == "export":
            continue
        match = re.fullmatch(r"([^=:]+)[=:](.+)", item)
        if match is None:
            raise InputError(f"{item!r} is no setting of {owner}.", "Write name=value pairs with commas between them.")
        name, value = match[1].removeprefix(prefix), match[2]
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f" Is it {nearest[0]}?" if nearest else ""
            raise InputError(
                f"{owner} has no setting {match[1]!r}.{hint}", f"Its settings are {', '.join(sorted(known))}."
            )
        if given.get(name, value) != value:
            raise InputError(f"{name} is given as {given[name]} and as {value}.", "Give it once.")
        given[name] = value
    return {name: known[name](name, value) for name, value in given.items()}


def refused(name: str, value: str, rule: str) -> InputError:
    """The error for a value that breaks a rule."""
    return InputError(f"{name} is {value}.", f"It must be {rule}.")


def megabytes(name: str, value: str) -> int:
    """Whole MiB, as bytes."""
    found = whole_number(value)
    if found is None:
        raise refused(name, value, "a whole number of MiB, 0 or more")
    return found * MIB


def size_in_bytes(name: str, value: str) -> int:
    """A power of two."""
    found = whole_number(value)
    if found is None or found.bit_count() != 1:
        raise refused(name, value, "a power of two, in bytes")
    return found


def number(name: str, value: str) -> float:
    """A number that stays finite in bytes."""
    try:
        found = float(value)
    except ValueError:
        raise refused(name, value, "a number") from None
    if not abs(found) < LARGEST:  # no comparison holds for not-a-number
        raise refused(name, value, f"a finite number below {LARGEST:g}")
    return found


def share(name: str, value: str) -> float:
    """A number from 0 to 1."""
    found = number(name, value)
    if not 0 <= found <= 1:
        raise refused(name, value, "between 0 and 1")
    return found


def boolean(name: str, value: str) -> bool:
    """True or False, in any case, or 1 or 0."""
    known = {"true": True, "1": True, "false": False, "0": False}
    if value.lower() not in known:
        raise refused(name, value, "true or false")
    return known[value.lower()]


def one_of(*choices: str) -> Reader:
    """A reader of one of several words."""

    def read(name: str, value: str) -> str:
        if value not in choices:
            raise refused(name, value, " or ".join(choices))
        return value

    return read
