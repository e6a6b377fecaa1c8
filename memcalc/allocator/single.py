"""Single-precision arithmetic, as C++ does it where its constants are floats."""

from __future__ import annotations

import struct


def float32(value: float) -> float:
    """`value` rounded to the nearest number of single precision."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
