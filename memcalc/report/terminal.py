"""Draws grids and lists on the console: spaces and alignment only, so that logs read as well as terminals.

The lines are set here rather than by rich.table, which takes as long for a screen as the whole estimate does.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from memcalc.report.grid import Column, Grid
from memcalc.report.words import letter_style

_INDENT = 2
_GAP = 2
_NARROWEST = 12  # a column that wraps keeps this much, whatever the others need


def draw_grid(console: Console, grid: Grid) -> None:
    """A grid under its title, followed by an empty line."""
    widths = _widths(grid, console.width)
    text = Text()
    if grid.title:
        text.append(f"{grid.title}\n", style="bold")
    if grid.head:
        heads = tuple(column.head for column in grid.columns)
        text.append("\n".join(_lines(grid.columns, heads, widths)) + "\n", style="dim")
    for number, row in enumerate(grid.rows):
        lines = "\n".join(_lines(grid.columns, row, widths)) + "\n"
        start = len(text)
        text.append(lines, style="bold" if number in grid.strong else "")
        if grid.letters and row[0]:
            text.stylize(letter_style(row[0]), start + _INDENT, start + _INDENT + 1)
    console.print(text, no_wrap=True, overflow="ignore", crop=False)


def draw_list(console: Console, title: str, items: Iterable[str]) -> None:
    """A list under its title; nothing where it is empty."""
    rows = [("-", text) for text in items]
    if rows:
        draw_grid(console, Grid(title, (Column(""), Column("", wrap=True)), rows, head=False))


def draw_line(console: Console, line: str, indent: int, style: str = "") -> None:
    """One line, indented; where it is too long it goes on further to the right."""
    blank = " " * indent
    lines = [blank + line]
    if cell_len(lines[0]) > console.width:
        width = max(indent + _GAP + _NARROWEST, console.width)
        further = blank + " " * _GAP
        lines = textwrap.wrap(line, width, initial_indent=blank, subsequent_indent=further, break_on_hyphens=False)
    console.print(Text("\n".join(lines), style=style), no_wrap=True, overflow="ignore", crop=False)


def _widths(grid: Grid, room: int) -> list[int]:
    """The width of each column: its longest cell; columns that may wrap share what the others leave."""
    heads = [column.head for column in grid.columns] if grid.head else ["" for _ in grid.columns]
    widths = [max(cell_len(cell) for cell in cells) for cells in zip(heads, *grid.rows, strict=True)]
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
    cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for number in range(max(len(parts) for parts in cells)):
        line = " " * _INDENT
        for column, parts, width in zip(columns, cells, widths, strict=True):
            part = parts[number] if number < len(parts) else ""
            blank = " " * (width - cell_len(part))
            line += f"{blank}{part}" if column.right else f"{part}{blank}"
            line += " " * _GAP
        lines.append(line.rstrip())
    return lines


def _wrapped(cell: str, width: int) -> list[str]:
    if cell_len(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_on_hyphens=False) or [""]
