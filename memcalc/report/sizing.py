"""A result on the terminal: the verdict first, then where the memory goes, when, and what the numbers rest on."""

from __future__ import annotations

from itertools import groupby

from memcalc.ledger.result import ModuleResult, Result, Sizing
from memcalc.report.breakdown import bar_lines, component_grid, host_grid
from memcalc.report.grid import Grid
from memcalc.report.kv_cache import generation_grid
from memcalc.report.labels import letter_style, shortened
from memcalc.report.phases import phase_grid, rank_grid
from memcalc.report.screen import Screen
from memcalc.report.terminal import draw_grid, draw_line, draw_list
from memcalc.report.textbook import textbook_grid
from memcalc.report.verdict import because, error_bars, figures, subject, verdict
from memcalc.units import Unit
from memcalc.verdict.reasons import Reason

VERDICT_STYLES = {"fits": "bold green", "does-not-fit": "bold red", "unknown": "bold yellow", None: "bold"}


def draw_sizing(
    screen: Screen,
    result: Result | ModuleResult,
    unit: Unit = "GiB",
    *,
    all_ranks: bool = False,
    explain: str | None = None,
    brief: bool = False,
    reason: Reason | None = None,
    advice: str = "",
) -> None:
    """The whole screen of `memcalc estimate`.

    Args:
        screen: where to draw.
        result: what is shown.
        unit: of memory.
        all_ranks: with a line for each kind of rank.
        explain: the component whose rows are opened into formulas.
        brief: without the bar and the tables of components, phases and published formulas.
        reason: what decides the peak.
        advice: the command that looks for what fits.
    """
    for line in subject(result).splitlines():
        draw_line(screen, line, 0)
    screen.line()
    draw_line(screen, verdict(result, unit), 0, style=VERDICT_STYLES[result.verdict])
    for line in (error_bars(result, unit), because(reason, unit) if reason else "", advice):
        if line:
            draw_line(screen, line, 0)
    screen.line()
    draw_grid(screen, figures(result, unit))
    if not brief:
        _draw_bar(screen, result, unit)
        draw_grid(screen, component_grid(result, unit))
    if (host := host_grid(result, unit)) is not None:
        draw_grid(screen, host)
    if all_ranks:
        draw_grid(screen, rank_grid(result, unit))
    if not brief:
        draw_grid(screen, phase_grid(result, unit))
        published = published_grid(result, unit)
        if published is not None:
            draw_grid(screen, published)
    if explain is not None and isinstance(result, Result):
        _draw_explanation(screen, result, unit, explain)
    draw_list(screen, "Notes", map(shortened, result.notes))
    draw_list(screen, "Not modelled", result.not_modelled)


def published_grid(result: Result | ModuleResult, unit: Unit) -> Grid | None:
    """Return the table of the cache for generation, else published formulas compared with the ledger."""
    if isinstance(result, Result) and result.generation:
        return generation_grid(result, unit)
    return textbook_grid(result, unit)


def _draw_bar(screen: Screen, result: Sizing, unit: Unit) -> None:
    bar, below = bar_lines(result, unit, min(screen.width, 120) - 4)
    screen.line(("  ", ""), *(("".join(run), letter_style(mark)) for mark, run in groupby(bar)))
    if below:
        screen.line((f"  {below}", ""))
    screen.line()


def _draw_explanation(screen: Screen, result: Result, unit: Unit, word: str) -> None:
    from memcalc.report.explanation import PARAMETERS, chapters
    from memcalc.report.parameters import parameter_grid

    if word == PARAMETERS:
        draw_grid(screen, parameter_grid(result.spec.model))
        return
    for chapter in chapters(result, word, unit):
        screen.line((chapter.heading, "bold"))
        for group in chapter.groups:
            draw_line(screen, f"live {group.phases}; from {group.citation}", 2, style="dim")
            for entry in group.entries:
                draw_line(screen, f"{entry.what}  {entry.size}", 4)
                draw_line(screen, entry.formula, 8)
        if not chapter.groups:
            draw_line(screen, "nothing", 2)
        screen.line()
