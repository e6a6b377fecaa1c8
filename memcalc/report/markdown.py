"""A result as Markdown, with the tables of the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.ledger.result import ModuleResult, Result
from memcalc.report.labels import shortened
from memcalc.report.screen import PLAIN, Column, Details, TextTable, markdown_grid
from memcalc.report.screens.sizing import published_grid
from memcalc.report.screens.verdict import assumed, because, error_bars, figures, subject, verdict
from memcalc.report.tables.breakdown import component_grid
from memcalc.report.tables.phases import phase_grid, rank_grid
from memcalc.text import harmless
from memcalc.units import Unit


def sizing_markdown(result: Result | ModuleResult, unit: Unit = "GiB", details: Details = PLAIN) -> str:
    """Return the report of `memcalc estimate --format markdown`."""
    reason, explain = details.reason, details.explain
    lines = [f"## {harmless(result.name)}", "", harmless("; ".join(subject(result).lines)), ""]
    lines += [f"**{verdict(result, unit)}**", ""]
    for line in (assumed(result, unit), error_bars(result, unit), because(reason, unit) if reason else ""):
        lines += [line, ""] if line else []
    lines += markdown_grid(figures(result, unit))
    if not details.brief:
        lines += markdown_grid(component_grid(result, unit))
    if details.all_ranks:
        lines += markdown_grid(rank_grid(result, unit))
    if not details.brief:
        lines += markdown_grid(phase_grid(result, unit))
        published = published_grid(result, unit)
        lines += [] if published is None else markdown_grid(published)
    if explain is not None and isinstance(result, Result):
        lines += _explanation(result, unit, explain)
    lines += _items("Notes", tuple(map(shortened, result.notes)))
    lines += _items("Not modelled", result.not_modelled)
    return "\n".join(lines).rstrip()


def _explanation(result: Result, unit: Unit, word: str) -> list[str]:
    from memcalc.report.tables.explanation import PARAMETERS, RECIPE, chapters, parameter_grid

    if word == RECIPE:
        from memcalc.report.tables.explanation import recipe_grid

        return markdown_grid(recipe_grid(result.spec))
    if word == PARAMETERS:
        return markdown_grid(parameter_grid(result.spec.model))
    columns = (Column("tensor"), Column("bytes", right=True), Column("formula"), Column("live"), Column("source"))
    lines: list[str] = []
    for chapter in chapters(result, word, unit):
        rows = [(*entry, group.phases, group.citation) for group in chapter.groups for entry in group.entries]
        lines += markdown_grid(TextTable(chapter.heading, columns, rows))
    return lines


def _items(title: str, items: Iterable[str]) -> list[str]:
    lines = [f"- {harmless(item)}" for item in items]
    return [f"### {title}", "", *lines, ""] if lines else []
