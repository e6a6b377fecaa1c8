"""What a script's text leaves open, as marks within its words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_MARK = re.compile("\x00(\\d+)\x01")

Value = str | tuple[str, ...]  # a variable's text, or an array's words


class UndecidedValue(NamedTuple):
    """Something that the text does not decide: how it is written there, and what it may be, where branches say it."""

    text: str
    choices: tuple[Value, ...] = ()


class MarkTable:
    """Each open thing has one mark, so that equal things are equal texts."""

    def __init__(self) -> None:
        self._open: list[UndecidedValue] = []
        self._numbers: dict[UndecidedValue, int] = {}

    def mark(self, text: str, choices: Sequence[Value] = ()) -> str:
        """The mark of something open."""
        entry = UndecidedValue(text, tuple(dict.fromkeys(choices)))
        number = self._numbers.setdefault(entry, len(self._open))
        if number == len(self._open):
            self._open.append(entry)
        return f"\x00{number}\x01"

    def single_mark(self, word: str) -> UndecidedValue | None:
        """Return the expansion of a word that is a single mark."""
        match = _MARK.fullmatch(word)
        return self._open[int(match[1])] if match else None

    def shown(self, word: str) -> str:
        """A word with what its marks are called in the script."""
        return _MARK.sub(lambda match: self._open[int(match[1])].text, word)


def is_open(word: str) -> bool:
    """Whether a word holds a mark."""
    return "\x00" in word


def without_marks(text: str) -> str:
    """A script's own text, in which no mark can be."""
    return text.replace("\x00", "").replace("\x01", "")
