"""The parts of a recorded run next to its ledger: the plot, the phase log, the largest tensors, the reserved memory."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.allocator import History
from memcalc.allocator.fragmentation import pool_uses
from memcalc.events.memory_curve import MemoryCurve
from memcalc.events.timeline import Timeline
from memcalc.report.grid import TextTable
from memcalc.report.plots.text_chart import draw_curve
from memcalc.report.screen import Screen
from memcalc.report.tables.fragmentation import fragmentation_grids
from memcalc.report.tables.phase_log import phase_log_table
from memcalc.report.tables.tensors import tensor_grid
from memcalc.report.terminal import draw_grid
from memcalc.units import Unit


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run.

    Args:
        timeline: what happened.
        history: the same through PyTorch's allocator, where the device has one.
        limit: bytes that the GPU has for the allocator, where one is named.
    """

    timeline: Timeline
    history: History | None = None
    limit: int | None = None

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
