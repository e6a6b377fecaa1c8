"""An amount of memory: "5%" of a limit, or "2GiB"."""

from __future__ import annotations

import re
from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.units import parse_bytes


class Amount(NamedTuple):
    """An exact fraction of a limit, plus bytes; one of the two is zero."""

    text: str  # as the user wrote it
    numerator: int = 0
    denominator: int = 1
    size: int = 0

    def of(self, whole: int) -> int:
        """Return this amount in bytes, rounded up; a fraction is of `whole` bytes. A margin is never too small."""
        return self.size - (-whole * self.numerator // self.denominator)


FEWEST_BARE_BYTES = 2**20  # a smaller number without a unit is ambiguous: no GPU has so few bytes


def parse_budget(text: str) -> int:
    """Return the bytes of "70GiB" or "75161927680".

    Raises:
        InputError: the text is not a size, or is a small number without a unit, such as 70 for 70 GiB.
    """
    if _is_bare(text):
        raise InputError(f"{text!r} has no unit.", f"Write one, such as {text.strip()}GiB (2^30 bytes).")
    return parse_bytes(text)


def _is_bare(text: str) -> bool:
    number = text.strip()
    return number.isdecimal() and len(number) < 8 and 0 < int(number) < FEWEST_BARE_BYTES


def parse_amount(text: str) -> Amount:
    """Return the amount of "5%", "2.5 %", "2GiB" or "0".

    Raises:
        InputError: the text is neither a percentage up to 100% nor a size.
    """
    match = re.fullmatch(r"\s*(\d{1,30})(?:\.(\d{1,30}))?\s*%\s*", text)
    if match is not None:
        decimals = match[2] or ""
        amount = Amount(text.strip(), int(match[1] + decimals), 100 * 10 ** len(decimals))
        if amount.numerator <= amount.denominator:
            return amount
        raise InputError(f"{text!r} is more than 100%.", "Write at most 100%.")
    if _is_bare(text):
        raise InputError(f"{text!r} has no unit.", f"Write one: {text.strip()}% or {text.strip()}GiB.")
    try:
        return Amount(text.strip(), size=parse_bytes(text))
    except InputError:
        raise InputError(
            f"{text!r} is neither a percentage nor a size.", "Write a percentage such as 5%, or a size such as 2GiB."
        ) from None
