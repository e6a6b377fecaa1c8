"""The parts of a recorded run next to its ledger: the plot, the phase log, the largest tensors, the reserved memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from memcalc.allocator import History
from memcalc.allocator.fragmentation import pool_uses
from memcalc.events.memory_curve import MemoryCurve
from memcalc.events.timeline import AllocationGroup, Timeline, groups
from memcalc.report.labels import percent
from memcalc.report.plots.palette import mark
from memcalc.report.plots.text_chart import draw_curve
from memcalc.report.screen import Column, Screen, TextTable, draw_grid, numeric
from memcalc.report.tables.fragmentation import fragmentation_grids
from memcalc.report.tables.phase_log import phase_log_table
from memcalc.units import Unit, format_number


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run."""

    timeline: Timeline  # what happened
    history: History | None = None  # the same through PyTorch's allocator, where the device has one
    limit: int | None = None  # bytes that the GPU has for the allocator, where one is named

    @property
    def curve(self) -> MemoryCurve:
        """The memory curve to draw."""
        if self.history is None:
            return MemoryCurve(self.timeline, limit=self.limit)
        return MemoryCurve(self.timeline, self.history.allocated, self.history.reserved, self.limit)


def curve_tables(curve: MemoryCurve, unit: Unit) -> list[TextTable]:
    """Return the tables that follow from the events alone."""
    return [phase_log_table(curve, unit), tensor_grid(curve, unit)]


def run_grids(run: RecordedRun, unit: Unit) -> list[TextTable]:
    """All tables."""
    curve = run.curve
    grids = curve_tables(curve, unit)
    if run.history is not None:
        grids += fragmentation_grids(pool_uses(run.history.segments_at(curve.peak_event)), unit)
    return grids


def draw_run(screen: Screen, run: RecordedRun, unit: Unit, *, legend: bool = True) -> None:
    """Draw the text chart, with or without its legend, then the tables."""
    draw_curve(screen, run.curve, unit, legend=legend)
    for grid in run_grids(run, unit):
        draw_grid(screen, grid)


SHOWN = 15


def tensor_grid(curve: MemoryCurve, unit: Unit, shown: int = SHOWN) -> TextTable:
    """Return the tensors live at the peak, identical ones in one row, largest first; the last rows sum up the rest."""
    found = groups(curve.live_at_peak())
    whole = sum(group.bytes for group in found)
    rows = [_row(group, whole, unit) for group in found[:shown]]
    rest = found[shown:]
    if rest:
        size, count = sum(group.bytes for group in rest), sum(group.count for group in rest)
        rows.append(("", format_number(size, unit), percent(size, whole), f"{count:,}", "smaller ones", "", ""))
    rows.append(("", format_number(whole, unit), "", f"{sum(g.count for g in found):,}", "requested, total", "", ""))
    phase = curve.phase_of(curve.peak_event)
    columns = (
        Column(""),
        *numeric(unit, "share", "count"),
        Column("tensor", wrap=True),
        Column("module", wrap=True),
        Column("allocated by", wrap=True),
    )
    title = f"Largest at the peak{f', in {phase}' if phase else ''}"
    return TextTable(title, columns, rows, frozenset({len(rows) - 1}), letters=True)


def _row(group: AllocationGroup, whole: int, unit: Unit) -> tuple[str, ...]:
    return (
        mark(group.component),
        format_number(group.bytes, unit),
        percent(group.bytes, whole),
        f"{group.count:,}",
        f"{group.dtype}[{', '.join(map(str, group.shape))}]" if group.dtype else "-",
        group.module or "-",
        f"{group.operator.removeprefix('aten.')} {PurePosixPath(group.line).name}".strip() or "-",
    )
