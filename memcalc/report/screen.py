"""Tables as plain data, and the screen that they are drawn on: lines of text, in color where a terminal shows it.

Rich is loaded for color only: a log, a file or a pipe gets the same lines without it, and sooner. The lines are set
here rather than by rich.table, which takes as long for a screen as the whole estimate does.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TextIO

from memcalc.report.labels import letter_style
from memcalc.text import harmless

if TYPE_CHECKING:
    from memcalc.verdict.other_modules import OtherModules
    from memcalc.verdict.reasons import Reason


class Column(NamedTuple):
    """One column: its head, numbers to the right, and whether long text may wrap."""

    head: str
    right: bool = False
    wrap: bool = False


def numeric(*heads: str) -> tuple[Column, ...]:
    """Return columns of numbers, which are set to the right."""
    return tuple(Column(head, right=True) for head in heads)


class TextTable(NamedTuple):
    """A titled table."""

    title: str  # above it; empty: none
    columns: tuple[Column, ...]  # with their heads
    rows: Sequence[tuple[str, ...]]  # of texts
    strong: frozenset[int] = frozenset()  # the bold rows
    letters: bool = False  # whether column 0 has the letters of the bar
    head: bool = True  # whether the heads are shown
    legend: str = ""  # the meaning of its letters, below it; empty: it has none


def markdown_grid(grid: TextTable) -> list[str]:
    """Return the lines of the table in Markdown, under its title."""
    heads = [column.head for column in grid.columns]
    rules = ["---:" if column.right else "---" for column in grid.columns]
    lines = [f"### {grid.title}", ""] if grid.title else []
    lines += [_markdown_row(heads), _markdown_row(rules)]
    for number, row in enumerate(grid.rows):
        cells = [_escaped(cell) for cell in row]
        lines.append(
            _markdown_row([f"**{cell}**" if cell else "" for cell in cells] if number in grid.strong else cells)
        )
    return [*lines, *(["", grid.legend] if grid.legend else []), ""]


def _markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    text = text.replace("\n", " ").strip()
    return harmless(text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*"))


Span = tuple[str, str]  # a text and its style, in Rich's words: "bold"

# Colors of a terminal with 256 with a contrast of at least 3 to black and to white (WCAG 2.2, 1.4.11).
GOOD, BAD, UNSURE = "bold color(28)", "bold color(160)", "bold color(136)"


class Details(NamedTuple):
    """What the report of a run shows beyond its figures."""

    all_ranks: bool = False  # a line for each kind of rank
    explain: str | None = None  # the component to show with formulas
    brief: bool = False  # no bar, and no tables of components, phases and published formulas
    reason: Reason | None = None  # what decides the peak
    other: OtherModules | None = None  # the run with transformers' modules, where it needs much more or less
    advice: str = ""  # the command to try next


PLAIN = Details()


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


_INDENT = 2
_GAP = 2
_NARROWEST = 12  # a wrapped column keeps this much, regardless of the others


def draw_grid(screen: Screen, grid: TextTable) -> None:
    """Draw a table under its title, followed by an empty line."""
    if screen.keep(grid):
        return
    widths = _widths(grid, screen.width)
    if grid.title:
        screen.line((grid.title, "bold"))
    if grid.head:
        for line in _lines(grid.columns, tuple(column.head for column in grid.columns), widths):
            screen.line((line, "dim"))
    for number, row in enumerate(grid.rows):
        style = "bold" if number in grid.strong else ""
        mark = letter_style(row[0]) if grid.letters else ""
        for line in _lines(grid.columns, row, widths):
            cut = _INDENT + 1  # the letter, where there is one
            screen.line((line[:cut], mark or style), (line[cut:], style))
            mark = ""
    if grid.legend:
        draw_line(screen, grid.legend, _INDENT, style="dim")
    screen.line()


def draw_bar(screen: Screen, letters: str) -> None:
    """Draw a bar of letters, each in its color."""
    if not screen.keep(LetterBar(letters)):
        screen.line((" " * _INDENT, ""), *(("".join(run), letter_style(mark)) for mark, run in groupby(letters)))


def draw_list(screen: Screen, title: str, items: Iterable[str]) -> None:
    """Draw a list under its title; nothing if the list is empty."""
    rows = [("-", text) for text in items]
    if rows:
        draw_grid(screen, TextTable(title, (Column(""), Column("", wrap=True)), rows, head=False))


def draw_line(screen: Screen, line: str, indent: int, style: str = "") -> None:
    """Draw one line, indented; a long line continues with more indentation."""
    if screen.keep(ProseLine(line, indent, style)):
        return
    blank = " " * indent
    lines = [blank + line]
    if cells(lines[0]) > screen.width:
        width = max(indent + _GAP + _NARROWEST, screen.width)
        further = blank + " " * _GAP
        lines = textwrap.wrap(line, width, initial_indent=blank, subsequent_indent=further, break_on_hyphens=False)
    for part in lines:
        screen.line((part, style))


def _widths(grid: TextTable, room: int) -> list[int]:
    """Return the width of each column: its longest cell; columns that may wrap share the remaining width."""
    heads = [column.head for column in grid.columns] if grid.head else ["" for _ in grid.columns]
    widths = [max(cells(cell) for cell in column) for column in zip(heads, *grid.rows, strict=True)]
    excess = _INDENT + sum(widths) + _GAP * (len(widths) - 1) - room
    while excess > 0:
        index = max((i for i, column in enumerate(grid.columns) if column.wrap), key=widths.__getitem__, default=None)
        if index is None or widths[index] <= _NARROWEST:
            break
        widths[index] -= 1
        excess -= 1
    return widths


def _lines(columns: tuple[Column, ...], row: tuple[str, ...], widths: list[int]) -> list[str]:
    """One row as one line, or as several where a cell wraps."""
    parts = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for number in range(max(len(part) for part in parts)):
        line = " " * _INDENT
        for column, part, width in zip(columns, parts, widths, strict=True):
            text = part[number] if number < len(part) else ""
            blank = " " * (width - cells(text))
            line += f"{blank}{text}" if column.right else f"{text}{blank}"
            line += " " * _GAP
        lines.append(line.rstrip())
    return lines


def _wrapped(cell: str, width: int) -> list[str]:
    if cells(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_on_hyphens=False) or [""]


BAR_MARK = "#"


def letter_bar(parts: Sequence[tuple[str, int]], width: int) -> str:
    """Return the letters of `parts` in proportion to their sizes; at least one per part if there is room.

    The cells are dealt by largest remainder, so that they always fill the width.
    """
    shown = [(mark, size) for mark, size in parts if size > 0]
    whole = sum(size for _, size in shown)
    if not whole or width <= 0:
        return ""
    if len(shown) > width:
        largest = sorted(range(len(shown)), key=lambda i: -shown[i][1])[:width]
        shown = [shown[i] for i in sorted(largest)]
        whole = sum(size for _, size in shown)
    free = width - len(shown)  # one cell each; the rest in proportion
    cells = [1 + free * size // whole for _, size in shown]
    remainders = sorted(range(len(shown)), key=lambda i: -(free * shown[i][1] % whole))
    for i in remainders[: width - sum(cells)]:
        cells[i] += 1
    return "".join(mark * length for (mark, _), length in zip(shown, cells, strict=True))


def small_bar(size: int, largest: int, width: int) -> str:
    """Return a bar of one size relative to the largest."""
    return BAR_MARK * (round(width * size / largest) if largest > 0 else 0)
