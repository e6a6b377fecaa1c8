"""Screen of a measured run: its memory, the errors of the predictions, and the tables compared."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.ledger.result import Result
from memcalc.report.labels import signed_percent
from memcalc.report.screen import Column, Screen, TextTable, draw_grid, draw_line, draw_list
from memcalc.report.screens.verdict import subject
from memcalc.report.tables.breakdown import component_grid
from memcalc.report.tables.comparison import comparison_grids, draw_comparison, source_label
from memcalc.report.tables.phases import phase_grid
from memcalc.units import Unit, format_bytes, format_number


def measured_verdict(result: Result, unit: Unit) -> str:
    """Return the measured totals in one sentence."""
    headline = result.headline
    parts = [f"{format_bytes(result.ledger.peak_bytes, unit)} allocated, in {result.ledger.peak_phase}"]
    if headline.reserved_bytes is not None:
        parts.append(f"{format_bytes(headline.reserved_bytes, unit)} reserved")
    if headline.device_bytes is not None:
        parts.append(f"{format_bytes(headline.device_bytes, unit)} on the device")
    return f"MEASURED on {result.device}: {'; '.join(parts)}."


def prediction_verdict(predicted: Result, measured: Result) -> str:
    """Return the error of a prediction at the allocated peak, and whether the phase is right."""
    from memcalc.checking.comparison import compare, steady_phase

    sizes = compare(predicted, measured).totals[0]
    difference = sizes.excess(0, 1) or 0
    truth = measured.ledger.peak_bytes
    off = "byte-exact" if not difference else f"{signed_percent(difference, truth)} ({difference:+,} bytes)"
    named, real = predicted.ledger.peak_phase, measured.ledger.peak_phase
    phase = "in the same phase" if steady_phase(real) in (named, steady_phase(named)) else f"in {named}, not {real}"
    return f"{source_label(predicted)}: {off}, {phase}"


def draw_measured(screen: Screen, results: Sequence[Result], unit: Unit, missing: Sequence[str] = ()) -> None:
    """Draw the verdict, then the tables.

    Args:
        screen: where.
        results: predictions, and the measured one last.
        unit: of sizes.
        missing: predictions that could not be made, and why.
    """
    *predictions, measured = results
    for line in subject(measured).lines:
        draw_line(screen, line, 0)
    screen.line()
    draw_line(screen, measured_verdict(measured, unit), 0, "bold")
    for predicted in predictions:
        draw_line(screen, prediction_verdict(predicted, measured), 2)
    screen.line()
    if predictions:
        draw_comparison(screen, results, unit)
    else:
        for grid in alone_grids(measured, unit):
            draw_grid(screen, grid)
        draw_list(screen, "Notes", measured.notes)
    draw_list(screen, "Not compared", missing)


def measured_grids(results: Sequence[Result], unit: Unit) -> list[TextTable]:
    """Return the tables alone, for Markdown."""
    return comparison_grids(results, unit) if len(results) > 1 else alone_grids(results[-1], unit)


def alone_grids(measured: Result, unit: Unit) -> list[TextTable]:
    """Return the tables of a run without predictions."""
    return [component_grid(measured, unit), phase_grid(measured, unit)]


def rank_grid(ranks: Sequence[Result], unit: Unit) -> TextTable:
    """Return the memory of each rank at its peak."""
    rows = [
        (
            str(number),
            str(result.device),
            format_number(result.ledger.peak_bytes, unit),
            "-" if result.headline.reserved_bytes is None else format_number(result.headline.reserved_bytes, unit),
            "-" if result.headline.device_bytes is None else format_number(result.headline.device_bytes, unit),
            result.ledger.peak_phase,
        )
        for number, result in enumerate(ranks)
    ]
    sizes = tuple(Column(f"{word} {unit}", right=True) for word in ("allocated", "reserved", "device"))
    return TextTable("Ranks", (Column("rank", right=True), Column("device"), *sizes, Column("peak in")), rows)


def draw_ranks(screen: Screen, ranks: Sequence[Result], unit: Unit) -> None:
    """Draw a row per rank if they differ, else one sentence."""
    figures = {(result.ledger.peak_bytes, result.headline.reserved_bytes, result.ledger.peak_phase) for result in ranks}
    if len(figures) == 1:
        draw_line(screen, f"All {len(ranks)} ranks used the same memory.", 0)
        return
    draw_grid(screen, rank_grid(ranks, unit))
