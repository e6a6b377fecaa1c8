"""The sections of a view. Each is a dict with its `kind`, ready for `json.dumps`; `static/views.js` draws them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

from memcalc.report.screen import BAD, BAR_MARK, GOOD, UNSURE, LetterBar, ProseLine, Screen, Span, TextTable
from memcalc.text import harmless

Section = dict[str, Any]

# A terminal's colors, as classes of a style sheet, which has its own for light and dark.
CLASSES = {GOOD: "bold green", BAD: "bold red", UNSURE: "bold yellow"}

WIDTH = 120  # columns for lines that screens wrap themselves


class SectionScreen(Screen):
    """A screen that stores its content as sections: tables as tables, lines as lines."""

    def __init__(self) -> None:
        super().__init__(io.StringIO(), WIDTH)
        self.sections: list[Section] = []

    def line(self, *spans: Span) -> None:
        """Keep a line as it is set; an empty one ends a section."""
        text = "".join(part for part, _ in spans)
        if text.strip():
            self._add(text.strip(), len(text) - len(text.lstrip()), next((style for _, style in spans if style), ""))
        elif self.sections:
            self.sections[-1]["open"] = False

    def keep(self, part: TextTable | ProseLine | LetterBar) -> bool:
        """Keep a table, or a line of prose. A bar is left out: the table that follows has its numbers."""
        if isinstance(part, TextTable):
            self.sections.append(table_section(part))
        elif isinstance(part, ProseLine):
            self._add(*part)
        return True

    def _add(self, text: str, indent: int, style: str) -> None:
        if not (self.sections and self.sections[-1]["kind"] == "lines" and self.sections[-1]["open"]):
            self.sections.append({"kind": "lines", "open": True, "lines": []})
        self.sections[-1]["lines"].append(
            {"text": harmless(text), "indent": indent, "style": CLASSES.get(style, style)}
        )


def drawn_sections(draw: Callable[[Screen], None]) -> list[Section]:
    """Return a command's screen as sections."""
    recorder = SectionScreen()
    draw(recorder)
    return [{name: value for name, value in section.items() if name != "open"} for section in recorder.sections]


def table_section(grid: TextTable) -> Section:
    """Return a table, or a list if it has no head, without the column of letters that only terminals need.

    A last column of bars, which terminals draw as characters, becomes `shares` of the longest.
    """
    first = 1 if grid.letters else 0
    bars = [row[-1] if row else "" for row in grid.rows]
    longest = max(map(len, bars), default=0)
    drawn = longest > 0 and all(set(bar) <= {BAR_MARK} for bar in bars)
    last = -1 if drawn else None
    section = {
        "kind": "table",
        "title": harmless(grid.title),
        "columns": [{"head": column.head, "right": column.right} for column in grid.columns[first:last]],
        "rows": [[harmless(cell) for cell in row[first:last]] for row in grid.rows],
        "strong": sorted(grid.strong),
        "head": grid.head,
        "legend": harmless(grid.legend),
    }
    return section | {"shares": [round(len(bar) / longest, 4) for bar in bars]} if drawn else section


def list_section(title: str, items: Iterable[str]) -> list[Section]:
    """Return a list under its title; nothing if the list is empty."""
    found = [harmless(item) for item in items]
    return [{"kind": "list", "title": title, "items": found}] if found else []


def view(title: str, sections: Iterable[Section]) -> dict[str, Any]:
    """Sections under a title."""
    return {"title": harmless(title), "sections": [*sections]}


def group(title: str, views: Iterable[dict[str, Any]], *, folded: bool = False) -> Section:
    """Several views, side by side where there is room; folded: each opens when it is clicked."""
    return {"kind": "views", "title": title, "views": [*views], "folded": folded}
