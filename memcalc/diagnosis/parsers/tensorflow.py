"""Messages of TensorFlow, and of the BFC allocator that it shares with XLA.

Sources: tsl/framework/bfc_allocator.cc (AllocateRawInternal, DumpMemoryLog), allocator.cc (AllocatorStats),
tensorflow/core/framework/op_kernel.cc (allocate_tensor), tsl's cuda_driver.cc.
"""

from __future__ import annotations

import math
import re

from memcalc.diagnosis.parsers.cursor import Cursor
from memcalc.diagnosis.report import MessageFigures, OutOfMemoryReport
from memcalc.diagnosis.sizes import SIZE, PrintedSize, read_exact, read_size

HEADS: tuple[tuple[str, str], ...] = (
    ("bfc", r"(?:Allocator\((?P<allocator>\w{1,40})\)r|R)anoutofmemorytryingtoallocate(?=\d)"),
    ("tensor", r"OOMwhenallocatingtensorwithshape(?=\[)"),
    ("pool", r"(?:Totalbytesinpool|total_region_allocated_bytes_):(?=\d)"),
    ("stats", r"Stats:Limit:(?=\d)"),
    ("chunk", r"failedtoallocate(?=\d{1,9}(?:\.\d{1,9})?[KMGT]\(\d)"),
    ("eager", r"ResourceExhaustedError:failedtoallocatememory"),
)

FRAGMENTS = ("pool", "stats")  # not reports by themselves: they complete one

_SIZE = re.compile(SIZE)
_ROUNDED = re.compile(r"\(roundedto(\d{1,20})\)")
_OPERATOR = re.compile(r"requestedbyop(.{1,150}?)(?=Ifthecause|Currentallocation)")
_HARMLESS = re.compile(r"(?:withfreed_by_count=\d{1,9})?\.Thecallerindicatesthatthisisnotafailure")
_SHAPE = re.compile(r"\[((?:\d{1,12}(?:,\d{1,12}){0,11},?)?)\]")  # unambiguous: no backtracking into numbers
_TYPE = re.compile(r"andtype([a-z_]{1,20}?\d{0,3}(?:_[a-z0-9]{1,8})?)on/")
_DEVICE = re.compile(r"device:([A-Z]{3}):(\d{1,4})")
_POOL = re.compile(r"(\d{1,20})memory_limit_:(\d{1,20})")
_STATS = re.compile(r"(\d{1,20})InUse:(\d{1,20})MaxInUse:(\d{1,20})")
_CHUNK = re.compile(SIZE + r"\((\d{1,20})bytes\)fromdevice:CUDA_ERROR_OUT_OF_MEMORY")
_ALLOCATOR_NUMBER = re.compile(r"GPU_(\d{1,4})_bfc")

# Bytes of an element. Source: tensorflow/core/framework/types.cc (DataTypeSize).
_BYTES = {
    **dict.fromkeys(("double", "int64", "uint64", "complex64", "qint64"), 8),
    **dict.fromkeys(("float", "int32", "uint32", "qint32"), 4),
    **dict.fromkeys(("half", "bfloat16", "int16", "uint16", "qint16", "quint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "qint8", "quint8", "float8_e5m2", "float8_e4m3fn"), 1),
    "complex128": 16,
}


def parse(name: str, head: re.Match[str], cursor: Cursor) -> OutOfMemoryReport | None:
    """Return the report of the message, or part of one, at this head. None if it is not a message."""
    if name == "bfc":
        return _bfc(head["allocator"] or "", cursor)
    if name == "tensor":
        return _tensor(cursor)
    if name == "chunk":
        return _chunk(cursor)
    if name == "eager":
        return OutOfMemoryReport(framework="tensorflow", wording="TensorFlow, without figures")
    return _fragment(name, cursor)


def _bfc(allocator: str, cursor: Cursor) -> OutOfMemoryReport | None:
    size = cursor.take(_SIZE)
    if size is None:
        return None
    asked = read_size(size[1])
    if (rounded := cursor.take(_ROUNDED)) is not None:
        asked = read_exact(rounded[1])
    operator = cursor.take(_OPERATOR)
    harmless = cursor.take(_HARMLESS)
    number = _ALLOCATOR_NUMBER.search(allocator)
    return OutOfMemoryReport(
        framework="tensorflow",
        wording="BFC allocator",
        device_type="cpu" if "cpu" in allocator.lower() else "gpu",
        device=None if number is None else int(number[1]),
        figures=MessageFigures(asked=asked),
        operator="" if operator is None else operator[1].strip("."),
        fatal=harmless is None,
    )


def _tensor(cursor: Cursor) -> OutOfMemoryReport | None:
    shape = cursor.take(_SHAPE)
    if shape is None:
        return None
    sizes = [int(size) for size in shape[1].split(",") if size]
    kind = cursor.take(_TYPE)
    element = None if kind is None else _BYTES.get(kind[1])
    asked = None if element is None else PrintedSize(math.prod(sizes) * element)
    place = None if kind is None else cursor.skip_to(_DEVICE)
    return OutOfMemoryReport(
        framework="tensorflow",
        wording="TensorFlow",
        device_type="gpu" if place is None else place[1].lower(),
        device=None if place is None else int(place[2]),
        figures=MessageFigures(asked=asked),
        tensor=f"{'' if kind is None else kind[1]} {sizes}".strip(),
    )


def _chunk(cursor: Cursor) -> OutOfMemoryReport | None:
    """The driver failed to allocate a region; the allocator continues with a smaller one."""
    sizes = cursor.take(_CHUNK)
    if sizes is None:
        return None
    asked = read_exact(sizes[2])
    return OutOfMemoryReport(
        framework="tensorflow", wording="one attempt", figures=MessageFigures(asked=asked), fatal=False
    )


def _fragment(name: str, cursor: Cursor) -> OutOfMemoryReport | None:
    parts = cursor.take(_POOL if name == "pool" else _STATS)
    if parts is None:
        return None
    first, second, *rest = (read_exact(part) for part in parts.groups())
    figures = (
        MessageFigures(reserved=first, allowed=second)
        if name == "pool"
        else MessageFigures(allowed=first, allocated=second, peak=rest[0])
    )
    return OutOfMemoryReport(framework="tensorflow", wording=name, figures=figures)
