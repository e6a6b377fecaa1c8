"""Recovery of the intact parts of a truncated snapshot, in the reader process.

A pickle is a program for a small machine that returns its result at the last byte. But every object is registered in
the machine's memo as soon as it is begun, in file order. After a truncated file, the objects in the memo are identified
by their keys; objects that were still being filled are empty and skipped.
"""

from __future__ import annotations

from typing import Any

from memcalc.snapshots.unpickling import UnsafePickle, plain_memo

# The parts of a file, in the order in which PyTorch writes them.
PARTS = ("segments", "device_traces", "allocator_settings", "external_annotations")
_SEGMENT = {"address", "total_size", "blocks"}


def salvaged(content: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the complete segments, entries, settings and marks before the cut, and the missing or incomplete parts.

    Raises:
        Refused: not even one segment is complete.
    """
    memo = plain_memo(content)
    values = [memo[number] for number in sorted(memo)]
    begins = [_place(part, values) for part in PARTS]
    known = [at for at in begins if at is not None]
    if not known or known != sorted(known):
        raise UnsafePickle("it is truncated before its first complete part: writing or copying it was interrupted")
    ends = dict(zip(known, [*known[1:], len(values)], strict=True))
    of = {part: values[at + 1 : ends[at]] if at is not None else [] for part, at in zip(PARTS, begins, strict=True)}
    segments = [value for value in of["segments"] if isinstance(value, dict) and value.keys() >= _SEGMENT]
    if not segments:
        raise UnsafePickle("it is truncated before its first complete part: writing or copying it was interrupted")
    found = {
        "segments": segments,
        "device_traces": _traces(of["device_traces"][1:]),
        "allocator_settings": next((value for value in of["allocator_settings"] if isinstance(value, dict)), {}),
        "external_annotations": [v for v in of["external_annotations"] if isinstance(v, dict) and "stage" in v],
    }
    last = max(place for place, at in enumerate(begins) if at is not None)
    is_whole = PARTS[last] == "allocator_settings" and bool(found["allocator_settings"])  # filled at once
    return found, PARTS[last + is_whole :]


def _place(part: str, values: list[Any]) -> int | None:
    """Return the position of a part's name, which its contents follow."""
    for at, value in enumerate(values):
        if (
            isinstance(value, str)
            and value == part
            and all(isinstance(following, list | dict) for following in values[at + 1 : at + 2])
        ):
            return at
    return None


def _traces(values: list[Any]) -> list[list[dict[str, Any]]]:
    """Return the history of each device, up to the cut."""
    traces: list[list[dict[str, Any]]] = []
    inside: set[int] = set()  # objects that belong to an entry
    for value in values:
        if id(value) in inside:
            continue
        if isinstance(value, list):
            traces.append([])
        elif isinstance(value, dict) and "action" in value and traces:
            traces[-1].append(value)
            inside.update(id(part) for part in value.values() if isinstance(part, list | dict))
        elif value == {}:
            break  # the incomplete entry
    return traces
