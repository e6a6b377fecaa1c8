"""A result on the terminal: the verdict first, then where the memory goes, when, and what the numbers rest on."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from memcalc.ledger.result import Result
from memcalc.report.breakdown import bar_lines, component_grid
from memcalc.report.moments import phase_grid, rank_grid
from memcalc.report.terminal import draw_grid, draw_line, draw_list
from memcalc.report.textbook import textbook_grid
from memcalc.report.verdict import figures, subject, verdict
from memcalc.report.words import letter_style
from memcalc.units import Unit

_VERDICT_STYLES = {True: "bold green", False: "bold red", None: "bold"}


def draw_sizing(
    console: Console, result: Result, unit: Unit = "GiB", *, all_ranks: bool = False, explain: str | None = None
) -> None:
    """The whole screen of `memcalc estimate`."""
    for line in subject(result).splitlines():
        draw_line(console, line, 0)
    console.print()
    draw_line(console, verdict(result, unit), 0, style=_VERDICT_STYLES[result.fits])
    console.print()
    draw_grid(console, figures(result, unit))
    _draw_bar(console, result, unit)
    draw_grid(console, component_grid(result, unit))
    if all_ranks:
        draw_grid(console, rank_grid(result, unit))
    draw_grid(console, phase_grid(result, unit))
    draw_grid(console, textbook_grid(result, unit))
    if explain is not None:
        _draw_explanation(console, result, unit, explain)
    draw_list(console, "Notes", result.notes)
    draw_list(console, "Not modelled", result.not_modelled)


def _draw_bar(console: Console, result: Result, unit: Unit) -> None:
    bar, below = bar_lines(result, unit, min(console.width, 120) - 4)
    text = Text("  ")
    for mark in bar:
        text.append(mark, style=letter_style(mark))
    console.print(text)
    if below:
        console.print(Text(f"  {below}"))
    console.print()


def _draw_explanation(console: Console, result: Result, unit: Unit, word: str) -> None:
    from memcalc.report.explanation import PARAMETERS, chapters
    from memcalc.report.parameters import parameter_grid

    if word == PARAMETERS:
        draw_grid(console, parameter_grid(result.spec.model))
        return
    for chapter in chapters(result, word, unit):
        console.print(Text(chapter.heading, style="bold"))
        for group in chapter.groups:
            draw_line(console, f"alive {group.phases}; from {group.citation}", 2, style="dim")
            for entry in group.entries:
                draw_line(console, f"{entry.what}  {entry.size}", 4)
                draw_line(console, entry.formula, 8)
        if not chapter.groups:
            draw_line(console, "nothing", 2)
        console.print()
