"""What was measured beside what was estimated, phase by phase."""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger, Rows
from memcalc.ledger.result import Result
from memcalc.report.grid import Column, Grid
from memcalc.report.screen import Screen
from memcalc.report.terminal import draw_grid, draw_line, draw_list
from memcalc.report.words import signed_percent
from memcalc.units import Unit, format_number

_STEADY_STEP = "2"
_CUDA_ONLY = (Component.LIBRARY_WORKSPACE, Component.BLOCK_ROUNDING)


def steady_phase(phase: str) -> str:
    """The estimate's phase for a measured one: it gives step 1, and step 2 for all that follow."""
    name, _, step = phase.rpartition("_")
    return f"{name}_{_STEADY_STEP}" if step.isdigit() and int(step) > int(_STEADY_STEP) else phase


def measurement_grid(estimate: Result, measured: Result, unit: Unit) -> Grid:
    """Each measured phase: estimate, measured, difference in bytes and percent of what was measured."""
    ledger = _without_cuda(estimate.ledger) if measured.device == "cpu" else estimate.ledger
    rows = []
    for phase in measured.ledger.phases:
        got = measured.ledger.totals[phase]
        said = ledger.totals.get(steady_phase(phase))
        rows.append(_row(phase, said, got, unit))
    rows.append(_row("allocated peak", ledger.peak_bytes, measured.ledger.peak_bytes, unit))
    for name in ("reserved_bytes", "device_bytes"):
        said, known = getattr(estimate.headline, name), getattr(measured.headline, name)
        if known is not None:
            rows.append(_row(name.removesuffix("_bytes"), said, known, unit))
    columns = (Column("phase"), Column(f"estimate {unit}", right=True), Column("measured", right=True))
    differences = (Column("difference in bytes", right=True), Column("%", right=True))
    peak = len(measured.ledger.phases)
    return Grid(f"Measured on {measured.device}", (*columns, *differences), rows, frozenset({peak}))


def _without_cuda(ledger: Ledger) -> Ledger:
    """The ledger without what only CUDA's libraries and allocator hold."""
    return Ledger([Rows(row for row in ledger.rows if row.component not in _CUDA_ONLY)], ledger.phases)


def _row(phase: str, said: int | None, got: int, unit: Unit) -> tuple[str, ...]:
    if said is None:
        return (phase, "-", format_number(got, unit), "-", "-")
    return (
        phase,
        format_number(said, unit),
        format_number(got, unit),
        f"{said - got:+,}",
        signed_percent(said - got, got),
    )


def draw_measurement(screen: Screen, estimate: Result, measured: Result, unit: Unit) -> None:
    """The comparison, and what the measurement has to say about itself."""
    draw_line(screen, "Difference: the estimate less what was measured.", 0)
    if measured.device == "cpu":
        draw_line(screen, "The estimate is without the workspaces and the rounding that only CUDA has.", 0)
    draw_grid(screen, measurement_grid(estimate, measured, unit))
    draw_list(screen, "Notes", measured.notes)
