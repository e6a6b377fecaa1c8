"""Byte counts as text: the program's one formatter and one parser.

GiB is 2^30 bytes and GB is 10^9 bytes; nothing here mixes the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from memcalc.errors import InputError

Unit = Literal["GiB", "GB", "MiB", "bytes"]

BYTES_PER_UNIT: dict[str, int] = {
    "bytes": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}

DECIMALS = {"GiB": 2, "GB": 2, "MiB": 1, "bytes": 0}


def format_bytes(count: int, unit: Unit = "GiB") -> str:
    """Return `count` bytes in `unit`, with thousands separators: 3.5 * 2^30 -> "3.50 GiB"."""
    return f"{format_number(count, unit)} {unit}"


def format_host_memory(rank: int, node: int, unit: Unit = "GiB") -> str:
    """Return the host memory in bytes of a rank and of its node: "8.00 GiB of host memory per rank, 64.00 per node"."""
    text = f"{format_bytes(rank, unit)} of host memory"
    return text if rank == node else f"{text} per rank, {format_bytes(node, unit)} per node"


def format_number(count: int, unit: Unit = "GiB") -> str:
    """Return the number of `format_bytes` without its unit, for table columns with the unit in their head."""
    if unit == "bytes":
        return f"{count:,}"
    return f"{count / BYTES_PER_UNIT[unit]:,.{DECIMALS[unit]}f}"


def parse_bytes(text: str) -> int:
    """Return the bytes of a size: "70GiB", "80 GB", "512 MiB" or "1000000".

    Raises:
        InputError: the number or the unit is invalid, or the number is negative.
    """
    match = re.fullmatch(r"\s*(\d{1,30})(?:\.(\d{1,30}))?\s*([A-Za-z]*)\s*", text)
    units = {name.lower(): size for name, size in BYTES_PER_UNIT.items()}
    if match is None or (match[3] or "bytes").lower() not in units:
        raise InputError(
            f"{text!r} is not a size.",
            "Write a number and a unit, such as 70GiB (2^30 bytes) or 80GB (10^9 bytes).",
        )
    decimals = match[2] or ""
    scale: int = 10 ** len(decimals)
    return int(match[1] + decimals) * units[(match[3] or "bytes").lower()] // scale


def exact_size(size: int) -> str:
    """Return a number of bytes in the largest binary unit that divides it: "24GiB", "47100MiB"."""
    unit = next(each for each in ("TiB", "GiB", "MiB", "KiB", "B") if size % BYTES_PER_UNIT[each] == 0)
    return f"{size // BYTES_PER_UNIT[unit]}{unit}"


MOST_DIGITS = 30  # of a whole number; sizes in bytes, counts and times have fewer


def whole_number(text: str) -> int | None:
    """Return the whole number that a text contains; None for any other text and for more than 30 digits.

    For numbers of more than 4,300 digits Python itself raises a bare ValueError.
    """
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None


LARGEST_FACTOR = 1_000_000  # largest prime factor searched for: larger micro-batches fit no GPU


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order, within milliseconds for any number.

    If the number has two prime factors beyond LARGEST_FACTOR, divisors with only one of them are omitted.
    """
    found, rest, prime = [1], number, 2
    while prime * prime <= rest and prime <= LARGEST_FACTOR:
        powers = [1]
        while rest % prime == 0:
            rest //= prime
            powers.append(powers[-1] * prime)
        if len(powers) > 1:
            found = [each * power for each in found for power in powers]
        prime += 1 if prime == 2 else 2
    if rest > 1:
        found += [each * rest for each in found]
    return sorted(found)


def largest_that_fits(fits: Callable[[int], bool], most: int, start: int = 1) -> int:
    """Return a number from 1 to `most` that fits while the next one does not; 0 if not even 1 fits.

    The search goes outward from `start` in steps that double, then bisects.
    """
    low, high = 0, most + 1
    at, stride = max(start, 1), 1
    while high - low > 1:
        if fits(at):
            low = at
        else:
            high = at
        if high > most:
            at = min(low + stride, most)
        elif low == 0:
            at = max(high - stride, 1)
        else:
            at = (low + high) // 2
        stride *= 2
    return low
