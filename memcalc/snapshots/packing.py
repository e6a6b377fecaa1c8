"""Validation and packing of a snapshot's dictionaries into plain tuples, in the reader process.

Source of the format: torch/csrc/cuda/Module.cpp: THCPModule_memorySnapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memcalc.snapshots.columns import LARGEST, columns_of, shown
from memcalc.snapshots.unpickling import UnsafePickle

STATES = frozenset(("active_allocated", "active_pending_free", "active_awaiting_free", "inactive"))


def pack(found: object, lacks: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the snapshot as nested tuples, with all types checked.

    Args:
        found: the content of the pickle.
        lacks: its parts that are missing or incomplete, because it was truncated.

    Raises:
        Refused: the content is not a snapshot.
    """
    top = _dictionary(found, "the file")
    if not {"segments", "device_traces"} <= top.keys():
        if {"model", "state_dict", "optimizer"} & top.keys():
            raise UnsafePickle("it is a checkpoint, not a memory snapshot")
        raise UnsafePickle("it lacks segments and device_traces, which every memory snapshot since torch 2.1 has")
    stacks = _Stacks()
    pools = _Pools()
    traces = _list(top["device_traces"], "device_traces")
    return {
        "traces": tuple(_trace(trace, stacks, pools) for trace in traces),
        "segments": tuple(_segment(segment, stacks, pools) for segment in _list(top["segments"], "segments")),
        "settings": _settings(top.get("allocator_settings") or {}),
        "annotations": tuple(_annotation(a) for a in _list(top.get("external_annotations") or [], "annotations")),
        "stacks": tuple(stacks.stacks),
        "keys": tuple(_keys(traces)),
        "lacks": lacks,
    }


class _Stacks:
    """The unique stacks. A pickle shares its frames, so stacks are compared by the identity of their frames."""

    def __init__(self) -> None:
        self.stacks: list[tuple[tuple[str, int, str], ...]] = [()]
        self._contents: dict[tuple[tuple[str, int, str], ...], int] = {(): 0}
        self._numbers: dict[tuple[int, ...], int] = {}  # by all frames
        self._alike: dict[tuple[int, ...], tuple[list[Any], int]] = {}  # the first stack with the same sample of frames

    def number(self, frames: Any) -> int:
        """Return the number of a stack."""
        if not frames:
            return 0
        try:
            count = len(frames)
            some = (count, id(frames[0]), id(frames[count // 3]), id(frames[count * 2 // 3]))
        except (TypeError, KeyError):
            raise UnsafePickle(f"the stack {shown(frames)} is not a list of frames") from None
        known = self._alike.get(some)
        if known is not None and known[0] == frames:  # fast: identical objects are not compared in depth
            return known[1]
        number = self._number(frames)
        self._alike.setdefault(some, (frames, number))
        return number

    def _number(self, frames: Any) -> int:
        every = tuple(map(id, _list(frames, "frames")))
        number = self._numbers.get(every)
        if number is None:
            content = tuple(_frame(frame) for frame in frames)
            number = self._contents.setdefault(content, len(self.stacks))
            if number == len(self.stacks):
                self.stacks.append(content)
            self._numbers[every] = number
        return number


class _Pools:
    """Memory pools by number; the default pool is 0."""

    def __init__(self) -> None:
        self._numbers = {(0, 0): 0}

    def number(self, value: Any) -> int:
        if value == (0, 0):
            return 0
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise UnsafePickle(f"the pool {shown(value)} is not a pair of numbers")
        return self._numbers.setdefault((_integer(value[0], "pool"), _integer(value[1], "pool")), len(self._numbers))


def _trace(trace: Any, stacks: _Stacks, pools: _Pools) -> tuple[bytes, ...]:
    return columns_of(_list(trace, "a trace of a device"), stacks.number, pools.number)


def _segment(value: Any, stacks: _Stacks, pools: _Pools) -> tuple[Any, ...]:
    segment = _dictionary(value, "a segment")
    blocks = []
    address = _integer(segment.get("address"), "a segment's address")
    for item in _list(segment.get("blocks"), "a segment's blocks"):
        block = _dictionary(item, "a block")
        size = _integer(block.get("size"), "a block's size")
        state = block.get("state")
        if state not in STATES:
            raise UnsafePickle(f"the state of a block is {shown(state)}")
        requested = _integer(block.get("requested_size", size), "a block's requested size")
        state = "active_pending_free" if state == "active_awaiting_free" else state
        blocks.append((address, size, requested, state, stacks.number(block.get("frames"))))
        address += size
    numbers = (_integer(segment.get(key), key) for key in ("address", "total_size", "allocated_size", "active_size"))
    begin, total, allocated, active = numbers
    if address != begin + total:
        raise UnsafePickle(f"the blocks of the segment at {begin} make {address - begin} bytes of its {total}")
    return (
        _integer(segment.get("device", 0), "device"),
        begin,
        total,
        allocated,
        active,
        _integer(segment.get("requested_size", -1), "requested_size", least=-1),
        _integer(segment.get("stream", 0), "stream"),
        segment.get("segment_type") == "small",
        pools.number(segment.get("segment_pool_id", (0, 0))),
        segment.get("is_expandable") is True,
        tuple(blocks),
    )


def _frame(value: Any) -> tuple[str, int, str]:
    frame = _dictionary(value, "a frame")
    filename, line, name = frame.get("filename", ""), frame.get("line", 0), frame.get("name", "")
    if not (isinstance(filename, str) and isinstance(line, int) and isinstance(name, str)):
        raise UnsafePickle(f"a frame is {shown(value)}")
    return filename, line, name


def _annotation(value: Any) -> tuple[str, str, int, int]:
    annotation = _dictionary(value, "an annotation")
    stage, name = annotation.get("stage", ""), annotation.get("name", "")
    if not (isinstance(stage, str) and isinstance(name, str)):
        raise UnsafePickle(f"an annotation is {shown(value)}")
    return (
        stage,
        name,
        _integer(annotation.get("time_us", 0), "time_us"),
        _integer(annotation.get("device", 0), "device"),
    )


def _settings(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, setting in _dictionary(value, "allocator_settings").items():
        if isinstance(name, str) and isinstance(setting, bool | int | float | str):
            plain[name] = setting
        elif isinstance(name, str) and isinstance(setting, dict):
            plain[name] = {str(key): int(item) for key, item in setting.items() if isinstance(item, int)}
    return plain


def _keys(traces: list[Any]) -> set[str]:
    for trace in traces:
        for entry in trace[:1]:
            return {key for key in entry if isinstance(key, str)}
    return set()


def _typed(value_type: type, words: str) -> Callable[[Any, str], Any]:
    def check(value: Any, what: str) -> Any:
        if not isinstance(value, value_type):
            raise UnsafePickle(f"{what} is {shown(value)}, where {words} is expected")
        return value

    return check


_dictionary = _typed(dict, "a dictionary")
_list = _typed(list, "a list")


def _integer(value: Any, what: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < LARGEST:
        raise UnsafePickle(f"{what} is {shown(value)}, where a number from {least} on is expected")
    return value
