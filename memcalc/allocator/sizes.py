"""Size constants and rounding that all allocators share, in bytes."""

from __future__ import annotations

import struct

MIB = 2**20
UNLIMITED = 2**63 - 1  # stands for "no limit": larger than every size


def multiple(size: int, of: int) -> int:
    """Return `size` rounded up to a multiple of `of`."""
    return -(-size // of) * of


def float32(value: float) -> float:
    """Return `value` rounded to the nearest single-precision number, as C++ code with float constants computes."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
