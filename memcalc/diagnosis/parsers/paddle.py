"""PaddlePaddle's messages since 1.5.

Source: paddle/fluid/memory/allocation/cuda_allocator.cc and paddle/fluid/platform/gpu_info.cc; since 2.5
paddle/phi/core/memory/allocation/cuda_allocator.cc.
"""

from __future__ import annotations

import re
from typing import Any

from memcalc.diagnosis.parsers.cursor import Cursor
from memcalc.diagnosis.report import MessageFigures, OutOfMemoryReport
from memcalc.diagnosis.sizes import SIZE, PrintedSize, read_size

HEADS: tuple[tuple[str, str], ...] = (("paddle", r"OutofmemoryerroronGPU(?=\d)"),)

_PLACE = re.compile(r"(\d{1,4})\.")
_ASKED = re.compile(r"(?:GPU\d{1,4})?[Cc]annotallocate" + SIZE + r"(?:GPU)?memory(?:onGPU\d{1,4})?,")
_HELD = re.compile(SIZE + "memoryhasbeenallocatedand")
_FREE = re.compile("availablememoryis(?:only)?" + SIZE)
_LIMIT = re.compile(r"`?FLAGS_gpu_memory_limit_mb`?is(\d{1,12})")
TEXT_BEFORE_LIMIT = 700  # characters of advice, without whitespace

# Above the memory of any GPU: a counter that went below zero, as PaddlePaddle printed in 2022 (85 TB).
_WRAPPED = 2**46


def parse(_: str, __: re.Match[str], cursor: Cursor) -> OutOfMemoryReport | None:
    """Return the report of the message at this head; the cursor is after it. None if it is not a message."""
    place = cursor.take(_PLACE)
    if place is None:
        return None
    figures: dict[str, Any] = {}
    for name, pattern in (("asked", _ASKED), ("reserved", _HELD), ("free", _FREE)):
        if (part := cursor.take(pattern)) is not None:
            figures[name] = read_size(part[1])
    if "reserved" in figures and figures["reserved"].bytes >= _WRAPPED:
        del figures["reserved"]
    limit = cursor.skip_to(_LIMIT, TEXT_BEFORE_LIMIT)
    if limit is not None and int(limit[1]):  # 0: no limit
        figures["allowed"] = PrintedSize(int(limit[1]) * 2**20)
    return OutOfMemoryReport(
        framework="paddlepaddle",
        wording="PaddlePaddle 2.2 or later" if "reserved" in figures else "PaddlePaddle",
        device_type="gpu",
        device=int(place[1]),
        figures=MessageFigures(**figures),
    )
