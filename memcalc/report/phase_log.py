"""The run in the manner of a lab notebook: what each phase left, what it changed, how high it went."""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.events.course import Course
from memcalc.events.notebook import Line
from memcalc.report.grid import Column, Grid
from memcalc.units import Unit, format_number

_PEAK = "<- peak"


def notebook_grid(course: Course, unit: Unit) -> Grid:
    """One line for each phase; of micro-batches that are alike, one line for all of them."""
    folded = _folded(course.notebook())
    rows: list[tuple[str, ...]] = []
    strong: set[int] = set()
    for line, last in folded:
        holds_peak = line.peak == course.peak_bytes and not strong
        if holds_peak:
            strong.add(len(rows))
        change = f"{'+' if line.change > 0 else ''}{format_number(line.change, unit)}"
        sizes = (format_number(line.end, unit), change, format_number(line.peak, unit))
        rows.append((_name(line, last), *sizes, _PEAK if holds_peak else ""))
    what = "Allocated" if course.allocated is not None else "Requested"
    numbers = (Column("at its end", right=True), Column("change", right=True), Column("highest within", right=True))
    return Grid(f"Phase log: {what.lower()}, {unit}", (Column("phase"), *numbers, Column("")), rows, frozenset(strong))


def _folded(lines: Iterable[Line]) -> list[tuple[Line, int]]:
    """The lines, each with the turn of the last one that is like it; those in between are left out."""
    firsts: dict[tuple[object, ...], int] = {}
    kept: list[tuple[Line, int]] = []
    for line in lines:
        kind = (line.phase, line.end, line.change, line.peak)
        at = firsts.get(kind)
        if at is not None and kept[at][1] == line.turn - 1:
            kept[at] = (kept[at][0], line.turn)
        else:
            firsts[kind] = len(kept)
            kept.append((line, line.turn))
    return kept


def _name(line: Line, last: int) -> str:
    if last > line.turn:
        return f"{line.phase}, {line.turn} to {last}"
    return line.phase if line.turn == 1 else f"{line.phase}, {line.turn}"
