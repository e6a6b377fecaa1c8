"""Where reports are drawn: lines of text, in color where a terminal shows it.

Rich is loaded for color only. A log, a file or a pipe gets the same lines without it, and sooner.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from typing import TYPE_CHECKING, NamedTuple, TextIO

from memcalc.text import harmless

if TYPE_CHECKING:
    from memcalc.report.grid import TextTable

Span = tuple[str, str]  # a text and its style, in Rich's words: "bold"

# Colors of a terminal with 256 with a contrast of at least 3 to black and to white (WCAG 2.2, 1.4.11).
GOOD, BAD, UNSURE = "bold color(28)", "bold color(160)", "bold color(136)"


class ProseLine(NamedTuple):
    """A line of prose, which wraps where it is too long: its text, its indentation and its style."""

    text: str
    indent: int
    style: str


class LetterBar(NamedTuple):
    """A bar of letters, each in its color; its legend is the table that follows."""

    letters: str


class Screen:
    """Plain lines on a text stream."""

    def __init__(self, file: TextIO, width: int) -> None:
        self.file = file
        self.width = width

    def line(self, *spans: Span) -> None:
        """Print the spans as one line, and nothing after the last letter."""
        self.file.write(harmless("".join(text for text, _ in spans)).rstrip() + "\n")

    def keep(self, part: TextTable | ProseLine | LetterBar) -> bool:  # noqa: ARG002 -- for subclasses
        """Take a table, a line of prose or a bar as data; False: it is to be printed line by line."""
        return False


def make_screen() -> Screen:
    """Return the screen of standard output, with the width of the terminal, else of COLUMNS, else 80."""
    if wants_color():
        from memcalc.report.color_screen import ColorScreen

        return ColorScreen()
    return Screen(sys.stdout, shutil.get_terminal_size().columns)


def wants_color() -> bool:
    """Whether standard output shows colors; NO_COLOR and FORCE_COLOR say so for it."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def cells(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in text)
    return len(text) + wide - sum(unicodedata.combining(sign) > 0 for sign in text)
