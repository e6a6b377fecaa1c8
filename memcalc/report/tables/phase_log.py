"""The run in the manner of a lab notebook: what each phase left, what it changed, how high it went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import StringIO

from memcalc.events.memory_curve import MemoryCurve, PhaseLogLine
from memcalc.report.plots.html import html_table
from memcalc.report.screen import Column, Screen, TextTable, draw_grid, numeric
from memcalc.report.tables.phases import PEAK_MARK
from memcalc.units import Unit, format_number

WIDTH = 100  # of the table as text


@dataclass(frozen=True, repr=False)
class PhaseLog:
    """The phases of a run as a table; iterate over it for the lines."""

    lines: tuple[PhaseLogLine, ...]  # one for the baseline and one for each phase, in order, in bytes
    grid: TextTable  # the table, in which identical micro-batches share a line

    @classmethod
    def of(cls, curve: MemoryCurve, unit: Unit) -> PhaseLog:
        """Return the phase log of a run."""
        return cls(tuple(curve.notebook()), phase_log_table(curve, unit))

    def __iter__(self) -> Iterator[PhaseLogLine]:
        """Iterate over the lines."""
        return iter(self.lines)

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self.lines)

    def __getitem__(self, phase: str) -> PhaseLogLine:
        """Return the last line of a phase, such as "backward_1".

        Raises:
            KeyError: the run has no such phase.
        """
        found = [line for line in self.lines if line.phase == phase]
        if not found:
            raise KeyError(phase)
        return found[-1]

    def __repr__(self) -> str:
        """Return the table as text."""
        text = StringIO()
        draw_grid(Screen(text, WIDTH), self.grid)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return html_table(self.grid)


def phase_log_table(curve: MemoryCurve, unit: Unit) -> TextTable:
    """Return one line for each phase; identical micro-batches share a line."""
    folded = _folded(curve.notebook())
    rows: list[tuple[str, ...]] = []
    strong: set[int] = set()
    for line, last in folded:
        holds_peak = line.peak == curve.peak_bytes and not strong
        if holds_peak:
            strong.add(len(rows))
        change = f"{'+' if line.change > 0 else ''}{format_number(line.change, unit)}"
        sizes = (format_number(line.end, unit), change, format_number(line.peak, unit))
        rows.append((_name(line, last), *sizes, PEAK_MARK if holds_peak else ""))
    what = "Allocated" if curve.allocated is not None else "Requested"
    return TextTable(
        f"Phase log: {what.lower()}, {unit}",
        (Column("phase"), *numeric("at its end", "change", "peak"), Column("")),
        rows,
        frozenset(strong),
    )


def _folded(lines: Iterable[PhaseLogLine]) -> list[tuple[PhaseLogLine, int]]:
    """Return one line per group of identical lines, with the turn of the last line of the group."""
    firsts: dict[tuple[object, ...], int] = {}
    kept: list[tuple[PhaseLogLine, int]] = []
    for line in lines:
        kind = (line.phase, line.end, line.change, line.peak)
        at = firsts.get(kind)
        if at is not None and kept[at][1] == line.turn - 1:
            kept[at] = (kept[at][0], line.turn)
        else:
            firsts[kind] = len(kept)
            kept.append((line, line.turn))
    return kept


def _name(line: PhaseLogLine, last: int) -> str:
    if last > line.turn:
        return f"{line.phase}, {line.turn} to {last}"
    return line.phase if line.turn == 1 else f"{line.phase}, {line.turn}"
