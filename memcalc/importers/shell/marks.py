"""Values that a script's text does not determine, as marks within its words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_MARK = re.compile("\x00(\\d+)\x01")

Value = str | tuple[str, ...]  # a variable's text, or an array's words


class UndecidedValue(NamedTuple):
    """A value that the script does not determine: its text there, and its possible values if branches set it."""

    text: str
    choices: tuple[Value, ...] = ()


class MarkTable:
    """Marks of unknown values; equal values have equal marks."""

    def __init__(self) -> None:
        self._open: list[UndecidedValue] = []
        self._numbers: dict[UndecidedValue, int] = {}

    def mark(self, text: str, choices: Sequence[Value] = ()) -> str:
        """Return the mark of an unknown value."""
        entry = UndecidedValue(text, tuple(dict.fromkeys(choices)))
        number = self._numbers.setdefault(entry, len(self._open))
        if number == len(self._open):
            self._open.append(entry)
        return f"\x00{number}\x01"

    def single_mark(self, word: str) -> UndecidedValue | None:
        """Return the unknown value of a word that is a single mark."""
        match = _MARK.fullmatch(word)
        return self._open[int(match[1])] if match else None

    @staticmethod
    def replaced(text: str, by: str) -> str:
        """Return a text with the same word in place of each mark."""
        return _MARK.sub(by, text)

    def shown(self, word: str) -> str:
        """Return a word with each mark replaced by its text in the script."""
        return _MARK.sub(lambda match: self._open[int(match[1])].text, word)


def is_open(word: str) -> bool:
    """Return whether a word has a mark."""
    return "\x00" in word


def without_marks(text: str) -> str:
    """Return a script's own text without characters that could be read as marks."""
    return text.replace("\x00", "").replace("\x01", "")
