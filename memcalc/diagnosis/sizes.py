"""Sizes as error messages print them: rounded, so each is known to half of its last digit."""

from __future__ import annotations

import string
from fractions import Fraction
from typing import NamedTuple

# Every framework's own formatter divides by 1024, also where it prints "GB": format_size of PyTorch's allocators
# (c10/cuda/CUDACachingAllocator.cpp, aten/src/ATen/mps/MPSAllocator.mm), HumanReadableSize of PaddlePaddle
# (paddle/utils/string/printf.h), HumanReadableNumBytes of TensorFlow and XLA (tsl/platform/numbers.cc).
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}

# In a text without blanks: "20.00MiB", "0bytes", "98.000244MB", "10.51G", "0B".
SIZE = r"(\d{1,20}(?:\.\d{1,9})?(?:bytes|[KkMGTPE]i?B?|B))"
EXACT = r"(\d{1,20})"

_LETTERS = string.ascii_letters

NO_LIMIT = 2**60  # more than any device has: how allocators write "no limit"


class Printed(NamedTuple):
    """A figure of a message."""

    bytes: int
    slack: int = 0  # the true figure is at most this far off, in bytes

    @property
    def low(self) -> int:
        """Return the lower bound."""
        return max(0, self.bytes - self.slack)

    @property
    def high(self) -> int:
        """Return the upper bound."""
        return self.bytes + self.slack

    def plus(self, other: Printed) -> Printed:
        """Return the sum; the uncertainties add up."""
        return Printed(self.bytes + other.bytes, self.slack + other.slack)

    def minus(self, other: Printed) -> Printed:
        """Return the difference, negative if a message contradicts itself."""
        return Printed(self.bytes - other.bytes, self.slack + other.slack)


NOTHING = Printed(0)


def total(figures: list[Printed]) -> Printed:
    """The sum of several figures."""
    return Printed(sum(figure.bytes for figure in figures), sum(figure.slack for figure in figures))


def read_size(text: str) -> Printed:
    """ "1.24GiB" -> 1.24 * 2^30 bytes, give or take 0.005 * 2^30; whole bytes are exact."""
    number = text.rstrip(_LETTERS)
    unit = text[len(number) :].upper().removesuffix("YTES").removesuffix("B").removesuffix("I")
    size = 1024 ** _POWERS[unit]
    digits = len(number.partition(".")[2])
    slack = 0 if size == 1 else -(-size // (2 * 10**digits))  # bytes are whole, however many zeros are printed
    return Printed(round(Fraction(number) * size), slack)


def read_exact(text: str) -> Printed:
    """A whole number of bytes."""
    return Printed(int(text))
