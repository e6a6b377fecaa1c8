"""Output of a measured run, and the files written from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.cli.output import WrittenFiles, print_json, print_text
from memcalc.cli.trace_output import write_run
from memcalc.report.screen import markdown_grid
from memcalc.units import Unit

if TYPE_CHECKING:
    from memcalc.measuring import Measurement
    from memcalc.validation.predicted_vs_measured import PredictedVsMeasured


def write_files(measurement: Measurement, plots: Iterable[Path], exports: Iterable[Path], unit: Unit) -> None:
    """Write the plots and the files for other programs."""
    plots, exports = tuple(plots), tuple(exports)
    if plots or exports:
        write_run(measurement.analysis, measurement.result, plots, exports, unit)


def write_measured_report(path: Path | None, files: WrittenFiles, found: PredictedVsMeasured, unit: Unit) -> None:
    """Write the report of a measured run: its timeline, and the tables that compare it with predictions."""
    if path is None:
        return
    from memcalc.events.memory_curve import MemoryCurve
    from memcalc.report.html.html_report import write_report
    from memcalc.report.views.runs import measured_view
    from memcalc.report.views.timeline import timeline_section

    measurement = found.measurement
    judged = measurement.analysis
    replay = judged.replay
    course = MemoryCurve(judged.timeline, *((None, None) if replay is None else (replay.allocated, replay.reserved)))
    with files.writing():
        write_report(path, measured_view(found, unit, [timeline_section(course, measurement.result, unit)]))


def print_measured(found: PredictedVsMeasured, form: str, unit: Unit, ranks: Sequence[dict[str, Any]] = ()) -> None:
    """Print a measured run with the predictions, and the memory of other ranks."""
    if form == "json":
        from memcalc.documents.measure import measured_document

        print_json(measured_document(found, ranks))
    elif form == "markdown":
        from memcalc.report.screens.measurement import measured_grids, measured_verdict, prediction_verdict, rank_grid
        from memcalc.validation.summary import as_result

        *predictions, measured = found.results
        lines = [f"**{measured_verdict(measured, unit)}**", ""]
        lines += [f"- {prediction_verdict(predicted, measured)}" for predicted in predictions]
        grids = measured_grids(found.results, unit)
        if ranks:
            grids.append(rank_grid([as_result(record) for record in ranks], unit))
        tables = [line for grid in grids for line in markdown_grid(grid)]
        print_text("\n".join([*lines, "", *tables]).rstrip())
    else:
        from memcalc.report.screen import make_screen
        from memcalc.report.screens.measurement import draw_measured, draw_ranks

        screen = make_screen()
        draw_measured(screen, found.results, unit, found.missing)
        if ranks:
            from memcalc.validation.summary import as_result

            draw_ranks(screen, [as_result(record) for record in ranks], unit)
