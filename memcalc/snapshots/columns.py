"""The history of a device in columns, to transfer a million entries between processes as a few byte strings.

`columns_of` writes them in the reader process, and `entries_of` reads them in the main process.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, cast

from memcalc.snapshots.recording import SnapshotEntry
from memcalc.snapshots.unpickling import UnsafePickle

ACTIONS = tuple("alloc free_requested free_completed segment_alloc segment_free segment_map segment_unmap oom".split())
_CODES = {action: code for code, action in enumerate(ACTIONS)}
_OTHER = 255  # the code of marks: snapshot, user_defined
LARGEST = 2**63  # all addresses, sizes and times are smaller
_UNKNOWN_POOL = -1


def columns_of(
    trace: list[Any], stack: Callable[[Any], int], pool: Callable[[Any], int]
) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]:
    """Return the fields of `SnapshotEntry`, each as the bytes of an array; actions by their position in `ACTIONS`.

    Args:
        trace: should be dictionaries with an action, an address and so on.
        stack: returns the number of a list of frames.
        pool: returns the number of a pool's id.

    Raises:
        Refused: the trace has any other content.
    """
    try:
        actions = bytes([_CODES.get(entry["action"], _OTHER) for entry in trace])
        if _OTHER in actions:
            trace = [entry for entry in trace if entry["action"] in _CODES]
            actions = actions.replace(bytes([_OTHER]), b"")
        numbers = (
            [entry.get("addr", -1) for entry in trace],
            [entry["size"] for entry in trace],
            [entry["stream"] for entry in trace],
            [entry.get("time_us", 0) for entry in trace],
        )
        if any({*map(type, column)} - {int} for column in numbers) or min(numbers[1], default=0) < 0:
            raise _refused(trace)
        addresses, sizes, streams, times = (array("q", column).tobytes() for column in numbers)
        stacks = array("q", [stack(entry.get("frames")) for entry in trace]).tobytes()
        pools = [entry.get("pool_id") for entry in trace]
    except (KeyError, TypeError, AttributeError, OverflowError):
        raise _refused(trace) from None
    told = array("q", [_UNKNOWN_POOL if one is None else pool(one) for one in pools] if any(pools) else ())
    return actions, addresses, sizes, streams, times, stacks, told.tobytes()


def entries_of(columns: tuple[bytes, ...]) -> tuple[SnapshotEntry, ...]:
    """Return the entries of the history."""
    actions, *numbers, pools = columns
    told: Iterable[int | None] = repeat(None)
    if pools:
        told = (None if number == _UNKNOWN_POOL else number for number in array("q", pools))
    rows = zip(map(ACTIONS.__getitem__, actions), *(array("q", column) for column in numbers), told, strict=False)
    return cast("tuple[SnapshotEntry, ...]", tuple(map(tuple.__new__, repeat(SnapshotEntry), rows)))


def _refused(trace: list[Any]) -> UnsafePickle:
    """Return the error for the first invalid entry."""
    for entry in trace:
        try:
            if entry["action"] not in _CODES:
                continue
            numbers = (entry.get("addr", -1), entry["size"], entry["stream"], entry.get("time_us", 0))
        except (KeyError, TypeError, AttributeError) as error:
            return UnsafePickle(f"an entry of its history is {shown(entry)} ({error!r})")
        if any(type(n) is not int or not -LARGEST <= n < LARGEST for n in numbers) or numbers[1] < 0:
            return UnsafePickle(f"an entry of its history is {shown(entry)}")
    return UnsafePickle("an entry of its history is none")


_LONGEST = 40  # characters of a string
_KEYS = 8  # of a dictionary
_LARGEST = 2**63


def shown(value: Any) -> str:
    """Return the type of a value, and a short value itself."""
    if isinstance(value, str | bytes):
        return repr(value[:_LONGEST])
    if isinstance(value, int):
        return str(min(abs(value), _LARGEST))
    if isinstance(value, float | None):
        return repr(value)
    if isinstance(value, dict):
        keys = ", ".join(sorted(str(key)[:20] for key in list(value)[:_KEYS]))
        return f"a dictionary with {keys or 'nothing in it'}"
    return f"a {type(value).__name__}"
