"""An amount of memory: "5%" of a limit, or "2GiB"."""

from __future__ import annotations

import re
from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.units import parse_bytes


class Amount(NamedTuple):
    """A fraction of a limit, exact, plus bytes; one of the two is zero."""

    text: str  # as it was written
    numerator: int = 0
    denominator: int = 1
    size: int = 0

    def of(self, whole: int) -> int:
        """Return the bytes of this amount for `whole`, rounded up, so that a margin is never too small."""
        return self.size - (-whole * self.numerator // self.denominator)


FEWEST_BARE_BYTES = 2**20  # a smaller number without a unit is no number of bytes: no GPU is judged by so few


def parse_budget(text: str) -> int:
    """ "70GiB" or "75161927680" as bytes.

    Raises:
        InputError: it is no size; or so small a number without a unit that another one is meant: 70 for 70 GiB.
    """
    if _is_bare(text):
        raise InputError(f"{text!r} has no unit.", f"Write one, such as {text.strip()}GiB (2^30 bytes).")
    return parse_bytes(text)


def _is_bare(text: str) -> bool:
    number = text.strip()
    return number.isdecimal() and len(number) < 8 and 0 < int(number) < FEWEST_BARE_BYTES


def parse_amount(text: str) -> Amount:
    """ "5%", "2.5 %", "2GiB" or "0".

    Raises:
        InputError: it is neither a share up to 100% nor a size.
    """
    match = re.fullmatch(r"\s*(\d{1,30})(?:\.(\d{1,30}))?\s*%\s*", text)
    if match is not None:
        decimals = match[2] or ""
        amount = Amount(text.strip(), int(match[1] + decimals), 100 * 10 ** len(decimals))
        if amount.numerator <= amount.denominator:
            return amount
        raise InputError(f"{text!r} is more than the whole.", "Write a share up to 100%.")
    if _is_bare(text):
        raise InputError(f"{text!r} has no unit.", f"Write one: {text.strip()}% or {text.strip()}GiB.")
    try:
        return Amount(text.strip(), size=parse_bytes(text))
    except InputError:
        raise InputError(
            f"{text!r} is neither a share nor a size.", "Write a share such as 5%, or a size such as 2GiB."
        ) from None
