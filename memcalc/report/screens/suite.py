"""Screens of measured suites, and of traces compared with records: signed errors, and runs that differ or failed."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.documents.measure import missed, off_by
from memcalc.report.labels import label, plural, signed_percent
from memcalc.report.screen import Column, Screen, TextTable, draw_grid, draw_line, draw_list, numeric
from memcalc.validation.record_comparison import RecordComparison, operator_differences, run_of
from memcalc.validation.suite import SuiteOutcome
from memcalc.validation.summary import PredictedRecord, PredictionErrors, errors_of, summary

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
    columns = (Column("run", wrap=True), *numeric("bytes", "share"), Column("by operator", wrap=True))
    return TextTable(f"Peaks that differ: trace on {trace} minus measured", columns, rows)


def error_grid(errors: Sequence[PredictionErrors], prediction: str = "estimate") -> TextTable:
    """Return a prediction's errors; components as fractions of the peak, so that they sum to the error of the total."""
    rows = [
        (
            label(each.name),
            str(len(each.shares)),
            *map(_percent, (each.median, each.p95, each.worst)),
            _share(each.under),
            _share(each.exact),
        )
        for each in errors
    ]
    columns = (Column(f"{prediction} minus measured"), *numeric("runs", "median", "p95", "worst", "under", "exact"))
    strong = frozenset(at for at, each in enumerate(errors) if each.name in ("allocated", "reserved", "device"))
    return TextTable(f"Errors of the {prediction} (components: share of the run's peak)", columns, rows, strong)


def largest_grid(outcome: SuiteOutcome) -> TextTable:
    """Return the largest micro-batches, predicted and measured."""
    rows = [
        (search.overrides, *("-" if size is None else str(size) for size in (search.predicted, search.found)))
        for search in outcome.largest
    ]
    columns = (Column("run", wrap=True), *numeric("predicted", "found"))
    return TextTable("Largest micro-batch that fits", columns, rows)


def draw_suite(screen: Screen, outcome: SuiteOutcome) -> None:
    """How many were measured, then the tables."""
    dead = sum(record["outcome"] != "done" for record in outcome.records)
    known = len(outcome.records)
    words = f"{plural(known, 'run')} on record, {dead} of them out of memory; {outcome.fresh} measured now"
    draw_line(screen, f"{words}, searches included.", 0, "bold")
    screen.line()
    errors = summary(outcome.records)
    if errors:
        draw_grid(screen, error_grid(errors))
    if outcome.largest:
        draw_grid(screen, largest_grid(outcome))
    draw_list(screen, "Not measured", [f"{words}: {why}" for words, why in outcome.refused])


def _percent(share: float) -> str:
    return f"{100 * share:+.2f}%"


def _share(share: float) -> str:
    return f"{100 * share:.0f}%"
