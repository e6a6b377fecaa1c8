"""Sizes as error messages print them: rounded, so each is known to within half of its last digit."""

from __future__ import annotations

import string
from fractions import Fraction
from typing import NamedTuple

# Every framework's formatter divides by 1024, even if it prints "GB": format_size of PyTorch's allocators
# (c10/cuda/CUDACachingAllocator.cpp, aten/src/ATen/mps/MPSAllocator.mm), HumanReadableSize of PaddlePaddle
# (paddle/utils/string/printf.h), HumanReadableNumBytes of TensorFlow and XLA (tsl/platform/numbers.cc).
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}

# In a text without whitespace: "20.00MiB", "0bytes", "98.000244MB", "10.51G", "0B".
SIZE = r"(\d{1,20}(?:\.\d{1,9})?(?:bytes|[KkMGTPE]i?B?|B))"
EXACT = r"(\d{1,20})"

_LETTERS = string.ascii_letters

NO_LIMIT = 2**60  # more than the memory of any device: allocators print such numbers for "no limit"


class PrintedSize(NamedTuple):
    """A figure of a message."""

    bytes: int
    slack: int = 0  # maximum difference to the true figure, in bytes

    @property
    def low(self) -> int:
        """The lower bound."""
        return max(0, self.bytes - self.slack)

    @property
    def high(self) -> int:
        """The upper bound."""
        return self.bytes + self.slack

    def plus(self, other: PrintedSize) -> PrintedSize:
        """Return the sum; the uncertainties add up."""
        return PrintedSize(self.bytes + other.bytes, self.slack + other.slack)

    def minus(self, other: PrintedSize) -> PrintedSize:
        """Return the difference, negative if a message contradicts itself."""
        return PrintedSize(self.bytes - other.bytes, self.slack + other.slack)


NOTHING = PrintedSize(0)


def total(figures: list[PrintedSize]) -> PrintedSize:
    """Return the sum of several figures."""
    return PrintedSize(sum(figure.bytes for figure in figures), sum(figure.slack for figure in figures))


def read_size(text: str) -> PrintedSize:
    """Return "1.24GiB" as 1.24 * 2^30 bytes with a slack of 0.005 * 2^30; whole bytes are exact."""
    number = text.rstrip(_LETTERS)
    unit = text[len(number) :].upper().removesuffix("YTES").removesuffix("B").removesuffix("I")
    size = 1024 ** _POWERS[unit]
    digits = len(number.partition(".")[2])
    slack = 0 if size == 1 else -(-size // (2 * 10**digits))  # bytes are integers, regardless of printed zeros
    return PrintedSize(round(Fraction(number) * size), slack)


def read_exact(text: str) -> PrintedSize:
    """Return a whole number of bytes."""
    return PrintedSize(int(text))
