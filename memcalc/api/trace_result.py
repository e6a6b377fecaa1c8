"""What `memcalc.trace` returns: the recorded run, and its tables and plots for notebooks and programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memcalc.events.memory_curve import MemoryCurve
from memcalc.recorder.run_analysis import RunAnalysis
from memcalc.recorder.trace import ModuleTrace, Trace, fields_of
from memcalc.report.tables.phase_log import PhaseLog
from memcalc.units import Unit


class TraceResult(RunAnalysis):
    """A recorded run that shows itself."""

    @property
    def curve(self) -> MemoryCurve:
        """Memory over the run, from which plots and tables are drawn."""
        limit = None if self.gpu is None else self.gpu.usable_bytes - self.gpu.context_bytes
        replay = self.replay
        if replay is None:
            return MemoryCurve(self.timeline, limit=limit)
        return MemoryCurve(self.timeline, replay.allocated, replay.reserved, limit)

    def phase_log(self, unit: Unit = "MiB") -> PhaseLog:
        """Return allocated bytes at the end of each phase, their change and the peak within it.

        Args:
            unit: of the table that the log is shown as; its lines are in bytes.
        """
        return PhaseLog.of(self.curve, unit)

    def plot(self, file: str | Path | None = None, unit: Unit = "GiB") -> Any:
        """Draw memory over the run, stacked by component; return a `matplotlib.figure.Figure`, or None with a file.

        Args:
            file: .png, .svg or .html, to be written; None: draw a figure, which notebooks show.
            unit: of all numbers.

        Raises:
            InputError: the suffix is not known, or the directory does not exist.
            Unavailable: matplotlib is missing (extra `plot`); .html needs nothing.
        """
        if file is not None:
            from memcalc.report.plots.files import write_plot

            write_plot(file, self.curve, self.name, unit, lambda: [self.phase_log(unit).grid])
            return None
        from memcalc.report.plots.files import curve_figure

        return curve_figure(self.curve, self.name, unit)

    def _repr_html_(self) -> str:
        """Return the plot and the phase log for a notebook."""
        from memcalc.report.plots.html import curve_part

        unit: Unit = "GiB" if self.ledger.peak_bytes >= 2**30 else "MiB"
        return curve_part(self.curve, repr(self), unit, [self.phase_log(unit).grid])


@dataclass(frozen=True, repr=False)
class TracedRun(Trace, TraceResult):
    """A traced run of a configuration."""


@dataclass(frozen=True, repr=False)
class TracedModule(ModuleTrace, TraceResult):
    """A traced run of a module."""


def shown_run(trace: Trace) -> TracedRun:
    """Return a traced run of a configuration as one that shows itself."""
    return TracedRun(**fields_of(trace))


def shown_module(trace: ModuleTrace) -> TracedModule:
    """Return a traced run of a module as one that shows itself."""
    return TracedModule(**fields_of(trace))
