"""Draws grids and texts with Rich: spaces and alignment only, so that logs read as well as terminals."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memcalc.report.grid import Column, Grid
from memcalc.report.words import letter_style


def draw_grid(console: Console, grid: Grid) -> None:
    """A grid under its title, followed by an empty line."""
    if grid.title:
        console.print(Text(grid.title, style="bold"))
    table = Table(box=None, show_header=grid.head, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("", width=0)  # its padding indents the rows
    for column in grid.columns:
        table.add_column(
            column.head,
            justify="right" if column.right else "left",
            no_wrap=not column.wrap,
            overflow="fold" if column.wrap else "ellipsis",
        )
    for number, row in enumerate(grid.rows):
        cells = [Text(cell) for cell in row]
        if grid.letters and row[0]:
            cells[0].stylize(letter_style(row[0]))
        table.add_row("", *cells, style="bold" if number in grid.strong else None)
    console.print(table)
    console.print()


def draw_list(console: Console, title: str, items: Iterable[str]) -> None:
    """A list under its title; nothing where it is empty."""
    texts = list(items)
    if texts:
        columns = (Column(""), Column("", wrap=True))
        draw_grid(console, Grid(title, columns, [("-", text) for text in texts], head=False))
