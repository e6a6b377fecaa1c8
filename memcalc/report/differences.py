"""The report of `diff`: a table, Markdown, or a JSON document."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memcalc.checking.comparison import Difference, Line
from memcalc.ledger.result import Result
from memcalc.report.grid import Column, Grid, markdown_grid
from memcalc.report.screen import Screen
from memcalc.report.terminal import draw_grid, draw_line
from memcalc.report.verdict import subject, verdict
from memcalc.report.words import label, signed_percent
from memcalc.units import Unit, format_number


def difference_grids(difference: Difference, unit: Unit) -> list[Grid]:
    """Components at each one's peak with the totals below them, then the phases."""
    totals = [line for line in difference.totals if not (line.a is None and line.b is None)]
    parts = [*(line._replace(name=label(line.name)) for line in difference.components), *totals]
    strong = frozenset(range(len(difference.components), len(parts)))
    peaks = [result.ledger.peak_phase for result in (difference.a, difference.b)]
    where = f"At the peak: A in {peaks[0]}, B in {peaks[1]}"
    return [
        Grid(where, _columns("component", unit), _rows(parts, unit), strong),
        Grid("Phases", _columns("phase", unit), _rows(difference.phases, unit)),
    ]


def _columns(head: str, unit: Unit) -> tuple[Column, ...]:
    numbers = (Column(f"A {unit}", right=True), Column(f"B {unit}", right=True), Column("B - A", right=True))
    return (Column(head), *numbers, Column("%", right=True))


def _rows(lines: Iterable[Line], unit: Unit) -> list[tuple[str, ...]]:
    return [_row(line, unit) for line in lines]


def _row(line: Line, unit: Unit) -> tuple[str, ...]:
    a, b = ("-" if size is None else format_number(size, unit) for size in (line.a, line.b))
    change = line.difference
    if change is None or line.a is None:
        return (line.name, a, b, "-", "-")
    sign = "+" if change > 0 else ""
    return (line.name, a, b, f"{sign}{format_number(change, unit)}", signed_percent(change, line.a))


def _heads(difference: Difference, unit: Unit) -> list[tuple[str, Result, str]]:
    return [(name, result, verdict(result, unit)) for name, result in (("A", difference.a), ("B", difference.b))]


def draw_difference(screen: Screen, difference: Difference, unit: Unit) -> None:
    """Both runs in words, then the tables."""
    for name, result, answer in _heads(difference, unit):
        screen.line((f"{name}:", "bold"))
        for line in subject(result).splitlines():
            draw_line(screen, line, 2)
        draw_line(screen, answer, 2, style="bold")
    screen.line()
    for grid in difference_grids(difference, unit):
        draw_grid(screen, grid)


def difference_markdown(difference: Difference, unit: Unit) -> str:
    """The same tables in Markdown."""
    lines = []
    for name, result, answer in _heads(difference, unit):
        lines += [f"- {name}: {subject(result)}; **{answer}**".replace("\n", "; ")]
    lines.append("")
    for grid in difference_grids(difference, unit):
        lines += markdown_grid(grid)
    return "\n".join(lines).rstrip()


def difference_document(difference: Difference) -> dict[str, Any]:
    """The difference as JSON. Bytes; null where a run has no such quantity."""
    return {
        "schema_version": 1,
        **{
            name: {"name": result.spec.name, "peak_phase": result.ledger.peak_phase, "fits": result.fits}
            for name, result in (("a", difference.a), ("b", difference.b))
        },
        "components": _documents(difference.components),
        "totals": _documents(difference.totals),
        "phases": _documents(difference.phases),
    }


def _documents(lines: Iterable[Line]) -> dict[str, dict[str, int | None]]:
    return {line.name: {"a": line.a, "b": line.b, "difference": line.difference} for line in lines}
