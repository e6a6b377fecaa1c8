"""A table as plain data: each report builds it once, and the terminal, Markdown and tests read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memcalc.text import harmless


class Column(NamedTuple):
    """One column: its head, numbers to the right, and whether long text may wrap."""

    head: str
    right: bool = False
    wrap: bool = False


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
