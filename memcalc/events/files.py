"""Event streams as files: JSON lines, readable by eye and by any language.

The first line is an object with the format's name, its version and the columns. Every other line is one event: an
array in the order of the columns, without trailing defaults: `["alloc",7,4096]`, `["free",7]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from memcalc.errors import InputError
from memcalc.events.event import Event, EventType
from memcalc.files import naming, open_file
from memcalc.ledger.component import Component

FORMAT = "memcalc-events"
VERSION = 1

LONGEST_LINE = 1_000_000  # bytes; an event has some hundred
_MOST_BITS = 63  # of addresses, sizes and times

_DEFAULTS = tuple(Event(EventType.ALLOC))
_SHAPE = Event._fields.index("shape")
_COMPONENT = Event._fields.index("component")


class EventWriter:
    """Append events to a file, whole lines at a time, so that the file of a killed run stays readable.

    Args:
        path: the file; it is overwritten.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = path
        with naming(path):
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        try:
            self._write(_line({"format": FORMAT, "version": VERSION, "columns": list(Event._fields)}))
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def append(self, events: Iterable[Event]) -> None:
        """Write the events in one call."""
        self._write("".join(map(_event_line, events)))

    def _write(self, text: str) -> None:
        with naming(self._path):
            self._file.write(text)
            self._file.flush()

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Close the file; appended events stay, also after an error."""
        with suppress(OSError):  # a write that failed was reported when it happened
            self._file.close()


def write_events(path: Path | str, events: Iterable[Event]) -> None:
    """Write a whole stream to a file."""
    with EventWriter(path) as writer:
        writer.append(events)


def read_events(path: Path | str) -> Iterator[Event]:
    """Yield the events of a file, in order. A truncated last line is ignored.

    Raises:
        InputError: with file and line, if the file is not an event stream or has a newer version.
    """
    with open_file(path, "Name a file of memcalc events.") as file:
        lines = iter(lambda: file.readline(LONGEST_LINE + 1), b"")
        names = _columns(next(lines, b""), f"{path}:1")
        positions = [names.index(name) if name in names else None for name in Event._fields]
        plain = names == list(Event._fields)
        for number, line in enumerate(lines, start=2):
            if not line.endswith(b"\n") and len(line) <= LONGEST_LINE:
                return
            try:
                values = json.loads(line)
                event = event_from(values if plain else _in_our_order(values, positions))
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                raise InputError(
                    f"this line is not an event ({error}).",
                    'Each line is an array such as ["alloc",7,4096].',
                    f"{path}:{number}",
                ) from error
            yield event


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def _event_line(event: Event) -> str:
    end = len(event)
    while event[end - 1] == _DEFAULTS[end - 1]:
        end -= 1
    return _line(event[: max(end, 1)])


def _columns(line: bytes, where: str) -> list[str]:
    """Return the column names from the first line."""
    try:
        head: Any = json.loads(line)
        known = head["format"] == FORMAT and type(head["version"]) is int and isinstance(head["columns"], list)
    except (ValueError, TypeError, KeyError, RecursionError):
        known = False
    if not known:
        raise InputError(
            "this is not a file of memcalc events.", 'Its first line would be {"format":"memcalc-events",...}.', where
        )
    if head["version"] > VERSION:
        raise InputError(
            f"events of version {head['version']}; this memcalc reads up to version {VERSION}.",
            "Upgrade memcalc, or record the events again.",
            where,
        )
    return list(head["columns"])


def _in_our_order(values: list[Any], positions: list[int | None]) -> list[Any]:
    """Return the values in the order of `Event`, with defaults for columns missing from the file or the line."""
    return [
        default if at is None or at >= len(values) else values[at]
        for at, default in zip(positions, _DEFAULTS, strict=True)
    ]


def event_from(values: list[Any]) -> Event:
    """Return the event of a line's values, which are in the order of `Event`.

    Raises:
        ValueError, TypeError: a value does not have its column's type.
    """
    values[0] = EventType(values[0])
    if len(values) > _COMPONENT and values[_COMPONENT] is not None:
        values[_COMPONENT] = Component(values[_COMPONENT])
    if len(values) > _SHAPE:
        values[_SHAPE] = tuple(values[_SHAPE])
    event = Event(*values)
    for number in (event.storage, event.bytes, event.stream, event.time_us or 0, *event.shape):
        if type(number) is not int or number.bit_length() > _MOST_BITS:
            raise ValueError(f"{number!r} is not a whole number of 64 bits")
    if event.bytes < 0:
        raise ValueError(f"bytes = {event.bytes} is negative")
    for text in (event.phase, event.module, event.operator, event.dtype, event.line):
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not text")
    return event
