"""Draws grids, lists and bars of letters with spaces only, so that they are readable in logs.

The lines are set here rather than by rich.table, which takes as long for a screen as the whole estimate does.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from memcalc.report.grid import Column, TextTable
from memcalc.report.labels import letter_style
from memcalc.report.screen import LetterBar, ProseLine, Screen, cells

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
