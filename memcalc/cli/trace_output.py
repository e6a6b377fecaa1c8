"""Output of a traced run, and the files written from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from memcalc.cli.output import print_json, print_text
from memcalc.errors import InputError
from memcalc.ledger.result import ModuleResult, Result
from memcalc.report.screen import markdown_grid
from memcalc.units import Unit

if TYPE_CHECKING:
    from memcalc.recorder.run_analysis import RunAnalysis
    from memcalc.recorder.trace import ModuleTrace, Trace
    from memcalc.report.tables.recorded_run import RecordedRun
    from memcalc.spec.spec import Spec


def recorded(traced: Trace | ModuleTrace) -> RecordedRun:
    """Return the traced run, with the memory limit of the GPU if one is given."""
    from memcalc.report.tables.recorded_run import RecordedRun

    gpu = traced.result.gpu
    return RecordedRun(traced.timeline, traced.replay, None if gpu is None else gpu.usable_bytes - gpu.context_bytes)


def reject_options(given: Mapping[str, object], whose: str, why: str, remedy: str = "") -> None:
    """Refuse options that would have no effect.

    Args:
        given: each option with its value; false if it was not given.
        whose: what the options apply to: "of a module".
        why: the reason that this run takes none of them.
        remedy: how to fix it, as a sentence; default: to leave the options out.

    Raises:
        InputError: one of them was given.
    """
    found = [option for option, value in given.items() if value]
    if found:
        names = ", ".join(found)
        problem = f"{names} {'is an option' if len(found) == 1 else 'are options'} {whose}, but {why}."
        raise InputError(problem, remedy or f"Leave {names} out.")


def write_run(
    judged: RunAnalysis, result: Result | ModuleResult, plots: Iterable[Path], exports: Iterable[Path], unit: Unit
) -> None:
    """Write the plots and exports of a recorded run, with the result as the title."""
    from memcalc.report.screens.verdict import subject
    from memcalc.report.tables.recorded_run import RecordedRun, run_grids

    gpu = result.gpu
    limit = None if gpu is None else gpu.usable_bytes - gpu.context_bytes
    run = RecordedRun(judged.timeline, judged.replay, limit)
    title = subject(result).run
    for path in plots:
        from memcalc.report.plots.files import write_plot

        write_plot(path, run.curve, title, unit, lambda: run_grids(run, unit), result.source)
    for path in exports:
        from memcalc.report.exports import write_export

        # On a simulated device times are those of recording; on a real one, recording slows the step down.
        write_export(path, run, title, timed=False)


def write_trace_report(path: Path, traced: Trace, unit: Unit, compared: tuple[Result, ...]) -> None:
    """Write the report of a traced run: the view of an estimate, its own tables, and the results compared with."""
    from memcalc.report.html.html_report import write_report
    from memcalc.report.tables.recorded_run import run_grids
    from memcalc.report.views.runs import trace_view
    from memcalc.report.views.sections import table_section
    from memcalc.report.views.timeline import timeline_section

    run = recorded(traced)
    sections = [timeline_section(run.curve, traced.result, unit), *map(table_section, run_grids(run, unit))]
    write_report(path, trace_view(traced.result, unit, sections, compared))


def results_to_compare(spec: Spec, device: str, steps: int, alloc_conf: str) -> tuple[Result, ...]:
    """Return the results to compare with: the estimate, and for the null device a trace on fake tensors.

    These need torch in this Python, and do not run everything that the null device does (DistributedDataParallel).

    Raises:
        InputError: there are no formulas, so that the estimate would be the same trace once more.
    """
    from memcalc import api
    from memcalc.errors import MemcalcError
    from memcalc.step.skip_compiler import without_compiler

    found = [api.estimate(spec)]
    traced = found[0].source == "trace"
    if traced and device != "null":
        raise InputError(
            "the estimate of a model without formulas is the same trace.", "Leave --compare out.", "--compare"
        )
    if device == "null" and not traced:
        # Of PyTorch's CUDA build only the null device's own process finds the libraries.
        with suppress(MemcalcError, ImportError):
            without_compiler()
            found.append(api.trace(spec, steps=steps, alloc_conf=alloc_conf).result)
    return tuple(found)


def print_trace(traced: Trace | ModuleTrace, form: str, unit: Unit, *, compared: tuple[Result, ...] = ()) -> None:
    """Print a traced run, with what it is compared with."""
    run = recorded(traced)
    if form == "json":
        from memcalc.documents.result import document_with_sources
        from memcalc.report.tables.comparison import source_label

        print_json(document_with_sources(traced.result, **{source_label(other): other for other in compared}))
    elif form == "markdown":
        from memcalc.report.markdown import sizing_markdown
        from memcalc.report.tables.comparison import comparison_grids
        from memcalc.report.tables.recorded_run import run_grids

        grids = run_grids(run, unit)
        if isinstance(traced.result, Result) and compared:
            grids += comparison_grids((*compared, traced.result), unit)
        lines = [line for grid in grids for line in markdown_grid(grid)]
        print_text(f"{sizing_markdown(traced.result, unit)}\n\n" + "\n".join(lines).rstrip())
    elif form == "csv":
        from memcalc.report.csv_text import ledger_csv

        print_text(ledger_csv(traced.result))
    else:
        from memcalc.report.screen import make_screen
        from memcalc.report.screens.sizing import draw_sizing
        from memcalc.report.tables.comparison import draw_comparison
        from memcalc.report.tables.recorded_run import draw_run

        screen = make_screen()
        draw_sizing(screen, traced.result, unit)
        draw_run(screen, run, unit, legend=False)  # the table of components is on the screen
        if isinstance(traced.result, Result) and compared:
            draw_comparison(screen, (*compared, traced.result), unit)
