"""Messages of XLA: JAX, torch_xla and TensorFlow's compiled functions.

Sources: xla/pjrt/pjrt_stream_executor_client.cc, xla/tsl/framework/bfc_allocator.cc, xla/service/buffer_assignment.cc
(Stats::ToString); the formats of the TPU compiler and runtime are known only from published messages.
"""

from __future__ import annotations

import re

from memcalc.diagnosis.parsers.cursor import Cursor
from memcalc.diagnosis.report import MessageFigures, OutOfMemoryReport
from memcalc.diagnosis.sizes import SIZE, PrintedSize, read_exact, read_size

_EXHAUSTED = r"R(?:ESOURCE_EXHAUSTED|esourceexhausted):"

HEADS: tuple[tuple[str, str], ...] = (
    ("runtime", r"Outofmemory(?:whiletryingtoallocate|allocating)(?=\d)"),
    ("request", _EXHAUSTED + r"Failedtoallocaterequestfor(?=\d)"),
    ("bottom", r"Attemptingtoreserve(?=\d)"),
    ("attempt", r"Attemptingtoallocate(?=\d)"),
    ("hbm", r"Ranoutofmemoryinmemoryspace(?=\w)"),
)

_SIZE = re.compile(SIZE)
_DOT = re.compile(r"\.")
_REQUEST = re.compile(SIZE + r"\((\d{1,20})B\)ondeviceordinal(\d{1,4})")
_BOTTOM = re.compile(
    SIZE + r"atthebottomofmemory\.Thatwasnotpossible\.Thereare" + SIZE + "free," + SIZE + "reserved,and" + SIZE
)
_ATTEMPT = re.compile(SIZE + r"\.Thatwasnotpossible\.Thereare" + SIZE + "free")
_TPU = r"\d{1,9}(?:\.\d{1,9})?[KMGT]?i?B?"
_HBM = re.compile(rf"(\w{{1,20}}?)\.Used({_TPU})of({_TPU})\w{{1,20}}?\.Exceeded\w{{1,20}}?capacityby({_TPU})(?!\d)")
_STATS = re.compile(r"BufferAssignmentOOMDebugging\.BufferAssignmentstats:")
_STAT = re.compile(
    "(parameter|constant|maybe_live_out|preallocatedtemp|unpreallocatedtemp|temp|total)(allocation|fragmentation):"
    + SIZE
    + r"(?:\(\d{1,3}\.\d{1,3}%\))?"
)
_NAMES = {"preallocatedtemp": "preallocated temp", "unpreallocatedtemp": "unpreallocated temp"}


def parse(name: str, _: re.Match[str], cursor: Cursor) -> OutOfMemoryReport | None:
    """Return the report of the message at this head; the cursor is after it. None if it is not a message."""
    if name == "runtime":
        return _runtime(cursor)
    if name == "request":
        return _request(cursor)
    if name == "hbm":
        return _hbm(cursor)
    return _attempt(name, cursor)


def _runtime(cursor: Cursor) -> OutOfMemoryReport | None:
    size = cursor.take(_SIZE)
    if size is None:
        return None
    cursor.take(_DOT)
    buffers: list[tuple[str, PrintedSize]] = []
    if cursor.take(_STATS) is not None:
        while (stat := cursor.take(_STAT)) is not None:
            buffers.append((f"{_NAMES.get(stat[1], stat[1])} {stat[2]}", read_size(stat[3])))
    figures = MessageFigures(asked=read_size(size[1]), buffers=tuple(buffers))
    return OutOfMemoryReport(framework="xla", wording="XLA", figures=figures)


def _request(cursor: Cursor) -> OutOfMemoryReport | None:
    parts = cursor.take(_REQUEST)
    if parts is None:
        return None
    return OutOfMemoryReport(
        framework="xla", wording="XLA", device=int(parts[3]), figures=MessageFigures(asked=read_exact(parts[2]))
    )


def _attempt(name: str, cursor: Cursor) -> OutOfMemoryReport | None:
    parts = cursor.take(_BOTTOM if name == "bottom" else _ATTEMPT)
    if parts is None:
        return None
    figures = MessageFigures(asked=read_size(parts[1]), free=read_size(parts[2]))
    return OutOfMemoryReport(framework="xla", wording="XLA on a TPU, at run time", device_type="tpu", figures=figures)


def _hbm(cursor: Cursor) -> OutOfMemoryReport | None:
    parts = cursor.take(_HBM)
    if parts is None:
        return None
    used, capacity, exceeded = (read_size(part) for part in parts.groups()[1:])
    figures = MessageFigures(asked=used, capacity=capacity, exceeded=exceeded)
    return OutOfMemoryReport(
        framework="xla", wording="XLA on a TPU, while compiling", device_type="tpu", figures=figures
    )
