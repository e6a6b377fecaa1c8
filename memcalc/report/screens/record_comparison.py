"""Traces compared with records that were measured before: signed errors, and each run that is not byte-exact."""

from __future__ import annotations

from memcalc.documents.measure import missed, off_by
from memcalc.report.grid import Column, TextTable
from memcalc.report.labels import plural, signed_percent
from memcalc.report.screen import Screen
from memcalc.report.screens.suite import error_grid
from memcalc.report.terminal import draw_grid, draw_line, draw_list
from memcalc.validation.record_comparison import RecordComparison, operator_differences, run_of
from memcalc.validation.summary import PredictedRecord, errors_of, summary

MOST_OPERATORS = 2  # named for each run that differs


def draw_compared(screen: Screen, compared: RecordComparison) -> None:
    """How many were traced, then for the estimate and each trace its errors, and the runs that differ."""
    records = plural(len(compared.records), "record")
    draw_line(screen, f"{records}; {plural(compared.fresh, 'trace')} made now.", 0, "bold")
    screen.line()
    if errors := summary(compared.records):
        draw_grid(screen, error_grid(errors))
    for trace in compared.traces:
        runs = compared.of(trace)
        if runs:
            draw_grid(screen, error_grid(errors_of(runs), f"trace on {trace}"))
        if misses := missed(runs):
            draw_grid(screen, miss_grid(misses, trace))
        predicted, failed = compared.predicted_failures(trace)
        if failed:
            draw_line(
                screen,
                f"Out of memory: the trace on {trace} predicts {predicted} of the {failed} runs that ran out.",
                0,
            )
            screen.line()
    draw_list(screen, "Not traced", [f"{words}: {why}" for words, why in compared.missing])


def miss_grid(misses: list[PredictedRecord], trace: str) -> TextTable:
    """Each run that differs: by how much, and by which operators' allocations."""
    rows = [
        (
            run_of(run.record),
            f"{off_by(run):+,}",
            signed_percent(off_by(run), run.measured.ledger.peak_bytes),
            ", ".join(f"{name} {size:+,}" for name, size in operator_differences(run)[:MOST_OPERATORS]) or "-",
        )
        for run in misses
    ]
    columns = (
        Column("run", wrap=True),
        Column("bytes", right=True),
        Column("share", right=True),
        Column("by operator", wrap=True),
    )
    return TextTable(f"Peaks that differ: trace on {trace} minus measured", columns, rows)
