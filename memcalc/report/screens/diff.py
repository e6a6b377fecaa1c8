"""The report of `diff`: a table, Markdown, or a JSON document."""

from __future__ import annotations

from memcalc.checking.comparison import Comparison
from memcalc.ledger.result import Result
from memcalc.report.screen import Screen, TextTable, draw_grid, draw_line, markdown_grid
from memcalc.report.screens.verdict import subject, verdict
from memcalc.report.tables.comparison import ComparisonLayout
from memcalc.units import Unit


def difference_grids(difference: Comparison, unit: Unit) -> list[TextTable]:
    """Return the components at the peak of each with their totals, then the phases; B minus A."""
    table = ComparisonLayout(difference, ("A", "B"), 0, unit, exact=False)
    return [*table.components(), *table.phases()]


def _heads(difference: Comparison, unit: Unit) -> list[tuple[str, Result, str]]:
    return [(name, result, verdict(result, unit)) for name, result in (("A", difference.a), ("B", difference.b))]


def draw_difference(screen: Screen, difference: Comparison, unit: Unit) -> None:
    """Draw the summary of both runs, then the tables."""
    for name, result, answer in _heads(difference, unit):
        screen.line((f"{name}:", "bold"))
        for line in subject(result).lines:
            draw_line(screen, line, 2)
        draw_line(screen, answer, 2, style="bold")
    screen.line()
    for grid in difference_grids(difference, unit):
        draw_grid(screen, grid)


def difference_markdown(difference: Comparison, unit: Unit) -> str:
    """Return the same tables in Markdown."""
    lines = []
    for name, result, answer in _heads(difference, unit):
        lines.append(f"- {name}: {'; '.join(subject(result).lines)}; **{answer}**")
    lines.append("")
    for grid in difference_grids(difference, unit):
        lines += markdown_grid(grid)
    return "\n".join(lines).rstrip()
