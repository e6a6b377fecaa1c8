"""PyTorch's other messages: other allocators, Apple GPUs, host memory.

Sources: c10/cuda/CUDAMallocAsyncAllocator.cpp, c10/cuda/CUDACachingAllocator.cpp, aten/src/ATen/mps/MPSAllocator.mm,
c10/core/impl/alloc_cpu.cpp.
"""

from __future__ import annotations

import re
from typing import Any

from memcalc.diagnosis.parsers.cursor import Cursor
from memcalc.diagnosis.parsers.pytorch import DEVICE
from memcalc.diagnosis.report import MessageFigures, OutOfMemoryReport
from memcalc.diagnosis.sizes import EXACT, NO_LIMIT, SIZE, read_exact, read_size

HEADS: tuple[tuple[str, str], ...] = (
    ("endless", rf"(?P<endless>{DEVICE})outofmemory\.Triedtoallocatemorethan1EBmemory"),
    ("rejected", rf"(?P<rejected>{DEVICE})outofmemory\.Allocationwaspreemptivelyrejected"),
    ("pool", r"Allocationondevice(?=\d{1,4}wouldexceedallowedmemory)"),
    ("mps", r"MPSbackendoutofmemory"),
    ("host", r"DefaultCPUAllocator:(?:can'tallocatememory|notenoughmemory):youtriedtoallocate"),
    ("attempt", r"memoryallocationfailedwithOOMondevice"),
)

_REQUESTED = re.compile(r"becauseitwouldexceedper_process_memory_fractionlimit\.Requestedsize:" + SIZE)

_PLACE_3 = re.compile(r"(\d{1,4})wouldexceedallowedmemory\.(?:\(outofmemory\))?")
_POOL_LINES = (
    ("allocated", re.compile("Currentlyallocated:" + SIZE)),
    ("asked", re.compile("Requested:" + SIZE)),
    ("capacity", re.compile("Devicelimit:" + SIZE)),
    ("free", re.compile(r"Free\(accordingtoCUDA\):" + SIZE)),
    ("allowed", re.compile(r"PyTorchlimit\(setbyuser-suppliedmemoryfraction\):" + SIZE)),
)

_MPS = re.compile(
    r"\(MPSallocated:"
    + SIZE
    + ",otherallocations:"
    + SIZE
    + r"(?:,maxallowed:"
    + SIZE
    + r")?\)\.Triedtoallocate"
    + SIZE
)

_NUMBER = re.compile(EXACT)
_ATTEMPT = re.compile(r"(\d{1,4})whiletryingtoallocate(\d{1,20})bytes\(free:(\d{1,20}),total:(\d{1,20})\)")


def parse(name: str, head: re.Match[str], cursor: Cursor) -> OutOfMemoryReport | None:
    """Return the report of the message at this head; the cursor is after it. None if it is not a message."""
    device_type = (head["endless"] or head["rejected"] or "").lower()
    if name == "endless":
        return OutOfMemoryReport(framework="pytorch", wording="more than 2^60 bytes", device_type=device_type)
    return _READERS[name](device_type, cursor)


def _rejected(device_type: str, cursor: Cursor) -> OutOfMemoryReport:
    size = cursor.take(_REQUESTED)
    figures = MessageFigures() if size is None else MessageFigures(asked=read_size(size[1]))
    return OutOfMemoryReport(
        framework="pytorch", wording="PyTorch 2.12 or later, rejected", device_type=device_type, figures=figures
    )


def _pool(_: str, cursor: Cursor) -> OutOfMemoryReport | None:
    place = cursor.take(_PLACE_3)
    if place is None:
        return None
    figures: dict[str, Any] = {}
    for name, pattern in _POOL_LINES:
        if (line := cursor.take(pattern)) is not None:
            figures[name] = read_size(line[1])
    if "allowed" in figures and figures["allowed"].bytes >= NO_LIMIT:  # 2^64 - 1 is printed if there is no limit
        del figures["allowed"]
    return OutOfMemoryReport(
        framework="pytorch",
        wording="cudaMallocAsync",
        device_type="cuda",
        device=int(place[1]),
        figures=MessageFigures(**figures),
    )


def _mps(_: str, cursor: Cursor) -> OutOfMemoryReport | None:
    parts = cursor.take(_MPS)
    if parts is None:
        return None
    allocated, elsewhere, allowed, asked = (None if part is None else read_size(part) for part in parts.groups())
    figures = MessageFigures(asked=asked, allocated=allocated, elsewhere=elsewhere, allowed=allowed)
    return OutOfMemoryReport(framework="pytorch", wording="PyTorch on Apple's GPUs", device_type="mps", figures=figures)


def _host(_: str, cursor: Cursor) -> OutOfMemoryReport | None:
    number = cursor.take(_NUMBER)
    if number is None:
        return None
    return OutOfMemoryReport(
        framework="pytorch",
        wording="host memory",
        device_type="cpu",
        figures=MessageFigures(asked=read_exact(number[1])),
    )


def _attempt(_: str, cursor: Cursor) -> OutOfMemoryReport | None:
    """2.13: one line per failed driver call, even if the next attempt succeeds."""
    parts = cursor.take(_ATTEMPT)
    if parts is None:
        return None
    asked, free, capacity = (read_exact(part) for part in parts.groups()[1:])
    figures = MessageFigures(asked=asked, free=free, capacity=capacity)
    return OutOfMemoryReport(
        framework="pytorch",
        wording="PyTorch 2.13 or later, one attempt",
        device_type="cuda",
        device=int(parts[1]),
        figures=figures,
        fatal=False,
    )


_READERS = {"rejected": _rejected, "pool": _pool, "mps": _mps, "host": _host, "attempt": _attempt}
