"""A part of a limit: "5%" of it, or "2GiB" whatever it is."""

from __future__ import annotations

import re
from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.units import parse_bytes


class Amount(NamedTuple):
    """A share of something, exact, plus bytes; one of the two is zero."""

    text: str  # as it was written
    numerator: int = 0
    denominator: int = 1
    size: int = 0

    def of(self, whole: int) -> int:
        """How many bytes it is of `whole`, a share rounded up: what is to be kept free is not a byte too small."""
        return self.size - (-whole * self.numerator // self.denominator)


def parse_amount(text: str) -> Amount:
    """ "5%", "2.5 %", "2GiB" or "0".

    Raises:
        InputError: it is neither a share up to 100% nor a size.
    """
    match = re.fullmatch(r"\s*(\d+)(?:\.(\d+))?\s*%\s*", text)
    if match is not None:
        decimals = match[2] or ""
        amount = Amount(text.strip(), int(match[1] + decimals), 100 * 10 ** len(decimals))
        if amount.numerator <= amount.denominator:
            return amount
        raise InputError(f"{text!r} is more than the whole.", "Write a share up to 100%.")
    try:
        return Amount(text.strip(), size=parse_bytes(text))
    except InputError:
        raise InputError(
            f"{text!r} is neither a share nor a size.", "Write a share such as 5%, or a size such as 2GiB."
        ) from None
