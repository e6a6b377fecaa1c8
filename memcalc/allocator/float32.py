"""Single-precision arithmetic, as in C++ code with float constants."""

from __future__ import annotations

import struct


def float32(value: float) -> float:
    """Return `value` rounded to the nearest single-precision number."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
