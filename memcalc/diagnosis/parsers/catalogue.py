"""All message formats in one search: where a message begins, and which module parses it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from memcalc.diagnosis.parsers import driver, paddle, pytorch, pytorch_others, tensorflow, xla
from memcalc.diagnosis.parsers.cursor import LONGEST_PART, Cursor
from memcalc.diagnosis.report import OutOfMemoryReport

_MODULES: tuple[ModuleType, ...] = (pytorch, pytorch_others, paddle, tensorflow, xla, driver)
_HEADS = [(module, name, pattern) for module in _MODULES for name, pattern in module.HEADS]
_READERS = {f"head_{number}": (module, name) for number, (module, name, _) in enumerate(_HEADS)}
_HEAD = re.compile("|".join(f"(?P<head_{number}>{pattern})" for number, (_, _, pattern) in enumerate(_HEADS)))

# Every head contains one of these words: searching for them first is ten times faster.
_ANCHOR = re.compile(
    "utofmemory|Triedtoallocate|wouldexceedallowedmemory|youtriedtoallocate|OOMondevice|OOMwhenallocating|bytesinpool:"
    "|_allocated_bytes_:|Stats:Limit:|ailedtoallocate|Attemptingto|_STATUS_ALLOC_FAILED"
)
LONGEST_HEAD = 160  # characters

# PaddlePaddle's message reports its limit after some lines of advice.
_WAIT = {paddle: paddle.TEXT_BEFORE_LIMIT}

# Strings of which a log with a message contains at least one, regardless of line breaks: each message has several.
TRIGGERS = tuple(
    word.encode()
    for word in (
        "ut of memory",  # Out, out, Ran out
        "ried to allocate",
        "total capac",
        "reserved in total by",
        "is allocated by PyTorch",
        "would exceed allowed memory",
        "OOM when allocating",
        "bytes in pool: ",
        "total_region_allocated_bytes_",
        "MaxInUse",
        "Attempting to ",
        "RESOURCE_EXHAUSTED",
        "esource exhausted",
        "trying to allocate",
        "ailed to allocate",
        "_STATUS_ALLOC_FAILED",
        "OOM on device",
    )
)


class Head(NamedTuple):
    """The position at which a message begins."""

    module: ModuleType
    name: str
    match: re.Match[str]

    @property
    def fragment(self) -> bool:
        """Whether it is only a part of a report that began before."""
        return self.module is tensorflow and self.name in tensorflow.FRAGMENTS

    @property
    def wait(self) -> int:
        """Number of characters after the parsed text that may still belong to the message."""
        return _WAIT.get(self.module, LONGEST_PART)


class Effort:
    """Work spent on reading a log, in units of about 15 microseconds, the time of one line."""

    SEARCH = 10  # a failed search for a head around a word
    MESSAGE = 4  # a message of usual length found and parsed
    LETTERS = 20  # characters of a message per further unit

    def __init__(self) -> None:
        self.units = 0


def find_head(text: str, start: int, effort: Effort) -> Head | None:
    """Return the first head at `start` or later, in a text without whitespace."""
    at = start
    while (anchor := _ANCHOR.search(text, at)) is not None:
        found = _HEAD.search(text, max(start, anchor.start() - LONGEST_HEAD), anchor.end() + LONGEST_HEAD)
        if found is not None:
            name = next(group for group in _READERS if found[group] is not None)
            return Head(*_READERS[name], found)
        effort.units += Effort.SEARCH
        at = anchor.end()
    return None


def read_message(head: Head, text: str, effort: Effort) -> tuple[OutOfMemoryReport | None, int]:
    """Return the report that begins at a head, and the end of its text."""
    cursor = Cursor(text, head.match.end())
    report: OutOfMemoryReport | None = head.module.parse(head.name, head.match, cursor)
    effort.units += Effort.MESSAGE + (cursor.at - head.match.start()) // Effort.LETTERS
    return report, cursor.at


def has_trigger(chunk: bytes) -> bool:
    """Return whether a piece of a log may contain a message or a part of one."""
    return any(word in chunk for word in TRIGGERS)


_TRIGGER = re.compile(b"|".join(map(re.escape, TRIGGERS)))


def lines_with_triggers(chunk: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the lines in a chunk that may contain a message or a part of one."""
    end = -1
    for found in _TRIGGER.finditer(chunk):
        if found.start() < end:
            continue
        begin = chunk.rfind(b"\n", 0, found.start()) + 1
        end = chunk.find(b"\n", found.end())
        end = len(chunk) if end < 0 else end
        yield begin, end
