"""Messages of PyTorch's caching allocators since 1.0: CUDA, HIP, XPU, and NPU (torch_npu).

Sources: c10/cuda/CUDACachingAllocator.cpp (malloc), c10/xpu/XPUCachingAllocator.cpp; torch_npu's
NPUCachingAllocator.cpp keeps the format of PyTorch 1.x. Examples of each format, with links to their threads, are in
tests/diagnosis/messages.yaml.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from memcalc.diagnosis.parsers.cursor import Cursor
from memcalc.diagnosis.report import MessageFigures, OutOfMemoryReport, ProcessMemory
from memcalc.diagnosis.sizes import NOTHING, SIZE, read_size

DEVICE = "(?:CUDA|HIP|XPU|NPU|MLU|MUSA|PrivateUse1)"

HEADS: tuple[tuple[str, str], ...] = (
    ("pytorch", rf"(?:(?P<kind>{DEVICE})outofmemory\.)?Triedtoallocate(?=\d+(?:\.\d+)?(?:bytes|[KMGT]i?B)[.(])"),
)

_ASKED = re.compile(SIZE)
_PLACE_1 = re.compile(r"\(([A-Z]{3,4})(\d{1,4});")
_ITEM_1 = re.compile(
    SIZE + r"(totalcapacity|alreadyallocated|currentactive|free|allowed|cached|reservedintotalbyPyTorch)[;)]"
)
_HINT_1 = re.compile(r"\.?Ifreservedmemoryis>>allocatedmemorytrysetting(max_split_size_mb)")

_PLACE_2 = re.compile(r"\.?GPU(\d{1,4})hasatotal(capacty|capacity)of" + SIZE + "ofwhich" + SIZE + r"isfree\.")
_PROCESS = re.compile(r"Process(\d{1,10})has" + SIZE + r"memoryinuse\.")
_OWN = re.compile("Includingnon-PyTorchmemory,thisprocesshas" + SIZE + r"memoryinuse\.")
_ALLOWED = re.compile(SIZE + "allowed;")
_ALLOCATED = re.compile("Oftheallocatedmemory" + SIZE + "isallocatedbyPyTorch,")
_PRIVATE = re.compile("with" + SIZE + r"allocatedinprivatepools\(e\.g\.,[A-Z]{3,6}Graphs\),")
_UNALLOCATED = re.compile("and" + SIZE + r"isreservedbyPyTorchbutunallocated\.")
_HINT_2 = re.compile(
    r"Ifreservedbutunallocatedmemoryislargetrysetting(max_split_size_mb|PYTORCH_[A-Z_]{1,20}=expandable_segments:True)"
)

_ITEMS = {
    "totalcapacity": "capacity",
    "alreadyallocated": "allocated",
    "free": "free",
    "allowed": "allowed",
    "reservedintotalbyPyTorch": "reserved",
}


def parse(_: str, head: re.Match[str], cursor: Cursor) -> OutOfMemoryReport | None:
    """Return the report of the message at this head; the cursor is after it. None if it is not a message."""
    device_type = (head["kind"] or "").lower()
    asked = cursor.take(_ASKED)
    if asked is None:
        return None
    figures = MessageFigures(asked=read_size(asked[1]))
    place = cursor.take(_PLACE_1)
    if place is not None:
        return _native_1(device_type, figures, place, cursor)
    place = cursor.take(_PLACE_2)
    if place is not None:
        return _native_2(device_type or "cuda", figures, place, cursor)
    return (
        OutOfMemoryReport(framework="pytorch", wording="cut short", device_type=device_type, figures=figures)
        if device_type
        else None
    )


def _native_1(device_type: str, figures: MessageFigures, place: re.Match[str], cursor: Cursor) -> OutOfMemoryReport:
    """1.0 to 2.0, and torch_npu: all figures in one pair of parentheses."""
    cached = None
    found: dict[str, Any] = {}
    while (item := cursor.take(_ITEM_1)) is not None:
        if item[2] == "cached":  # 1.0 to 1.3: without allocated memory
            cached = read_size(item[1])
        elif item[2] in _ITEMS:
            found[_ITEMS[item[2]]] = read_size(item[1])
    figures = replace(figures, **found)
    if cached is not None and figures.allocated is not None:
        figures = replace(figures, reserved=figures.allocated.plus(cached))
    hint = cursor.take(_HINT_1)
    wording = "1.0 to 1.3" if cached is not None else "1.10 to 2.0" if hint else "1.4 to 2.0"
    device_type = device_type or {"GPU": "cuda"}.get(place[1], place[1].lower())
    return OutOfMemoryReport(
        framework="pytorch",
        wording="torch_npu" if device_type == "npu" else f"PyTorch {wording}",
        device_type=device_type,
        device=int(place[2]),
        figures=figures,
        setting="" if hint is None else hint[1],
    )


def _native_2(device_type: str, figures: MessageFigures, place: re.Match[str], cursor: Cursor) -> OutOfMemoryReport:
    """2.1 and later: sentences, with the memory of each process if the driver reports it."""
    figures = replace(figures, capacity=read_size(place[3]), free=read_size(place[4]))
    holders = []
    while True:
        if (holder := cursor.take(_PROCESS)) is not None:
            holders.append(ProcessMemory(int(holder[1]), read_size(holder[2])))
        elif (own := cursor.take(_OWN)) is not None:
            figures = replace(figures, process=read_size(own[1]))
        elif (allowed := cursor.take(_ALLOWED)) is not None:
            figures = replace(figures, allowed=read_size(allowed[1]))
        else:
            break
    private = NOTHING
    if (allocated := cursor.take(_ALLOCATED)) is not None:
        in_use = read_size(allocated[1])
        if (pools := cursor.take(_PRIVATE)) is not None:  # memory cached there is counted as allocated
            private = read_size(pools[1])
            figures = replace(figures, private=private)
        figures = replace(figures, allocated=in_use.minus(private))
        if (unallocated := cursor.take(_UNALLOCATED)) is not None:
            figures = replace(figures, reserved=in_use.plus(read_size(unallocated[1])))
    hint = cursor.take(_HINT_2)
    return OutOfMemoryReport(
        framework="pytorch",
        wording="PyTorch 2.1" if place[2] == "capacty" else "PyTorch 2.2 or later",
        device_type=device_type,
        device=int(place[1]),
        figures=figures,
        holders=tuple(holders),
        setting="" if hint is None else hint[1],
    )
