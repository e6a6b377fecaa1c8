"""`memcalc measure`: run the step on a GPU or CPU."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memcalc.cli.options import (
    CONFIG_HELP,
    Device,
    Export,
    Html,
    Plot,
    Set,
    Steps,
    TableJsonOrMarkdown,
    Units,
    complete_config,
)
from memcalc.cli.shorthand import ShorthandCommand, with_shorthands
from memcalc.errors import InputError, MemcalcError
from memcalc.text import harmless

if TYPE_CHECKING:
    from memcalc.measuring.ranks import RankPlace


CommandClass = ShorthandCommand  # its --lora and --recompute need no value


@with_shorthands()
def command(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help=CONFIG_HELP, autocompletion=complete_config)
    ] = None,
    *,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="A preset, in place of CONFIG.", autocompletion=complete_config)
    ] = None,
    suite: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure every run of this file that has no record yet.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="RECORDS", help="Compare these records with traces, without measuring.")
    ] = None,
    overrides: Set = None,
    device: Device = None,
    steps: Steps = 3,
    alloc_conf: Annotated[
        str, typer.Option("--alloc-conf", metavar="SETTINGS", help="PYTORCH_CUDA_ALLOC_CONF of the run.")
    ] = "",
    trace: Annotated[
        list[str] | None,
        typer.Option(metavar="fake|null|none", help="Trace to compare with; default: fake. Repeatable."),
    ] = None,
    headroom: Annotated[
        bool,
        typer.Option(
            "--headroom", help="Do not start a run that exceeds the device by its estimate; with --force only warn."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start the run even if it may not fit or the device is busy.")
    ] = False,
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="Append the results to this file.")] = None,
    plot: Plot = None,
    html: Html = None,
    export: Export = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="Python interpreter with a CUDA build of torch, for --trace null."),
    ] = None,
    form: TableJsonOrMarkdown = "table",
    units: Units = "MiB",
) -> None:
    """Measure the training step on a GPU or CPU.

    Compares the measured memory with the estimate and a trace, by component and phase. Needs torch. Under torchrun
    every rank measures itself, and rank 0 prints.

    Example: memcalc measure gpt2 --device cpu --steps 3
    """
    from memcalc import api
    from memcalc.cli.measure_output import print_measured, write_files, write_measured_report
    from memcalc.cli.messages import show_warning
    from memcalc.cli.output import WrittenFiles
    from memcalc.measuring.measure import MeasurementOutOfMemory, RecordNotWritten
    from memcalc.measuring.measurement import OUT_OF_MEMORY
    from memcalc.measuring.ranks import place
    from memcalc.report.progress import shown_progress
    from memcalc.validation.predicted_vs_measured import PredictedVsMeasured
    from memcalc.validation.single_run import MeasureOptions, measure_one_rank, measure_run

    gc.set_threshold(700, 10, 10)  # a running step makes garbage, unlike the start-up that main() tunes for
    here = place()
    _refuse_combinations(suite, compare, here, named=bool(config or model or overrides))
    if suite is not None:
        _measure_suite(suite, record, device, python, form)
        return
    if compare is not None:
        _compare(compare, record, _traces(trace), python, form)
        return
    if (config is None) == (model is None):
        raise InputError(
            "measure needs one configuration.", "Name CONFIG or --model NAME, e.g. `memcalc measure gpt2`."
        )
    traces = _traces(trace)
    spec = api.load_to_run(config or model or "", *(overrides or ()))
    first = here is None or here.rank == 0
    how = MeasureOptions(device, steps, record, alloc_conf, python, headroom, force, show_warning if first else None)
    files = WrittenFiles()
    ranks: tuple[dict[str, Any], ...] = ()
    unkept: MemcalcError | None = None
    try:
        if here is None:
            measurement = measure_run(spec, how)
        else:
            measurement, ranks = measure_one_rank(spec, how, here)
    except (
        MeasurementOutOfMemory,
        RecordNotWritten,
    ) as error:  # what was measured is shown; the message and the exit code are of the error
        measurement, unkept = error.measurement, error
    if first:
        with files.writing():
            write_files(measurement, plot or (), export or (), units)
        if measurement.outcome == OUT_OF_MEMORY:
            found = PredictedVsMeasured(None, (), measurement, ())
        else:
            if here is None and traces:
                _trace_here()
            with shown_progress() as progress:
                found = api.compare_measured(measurement, *traces, python=python, progress=progress)
        write_measured_report(html, files, found, units)
        print_measured(found, form, units, ranks)
    if unkept is not None:
        raise unkept
    files.complain()


def _refuse_combinations(suite: Path | None, compare: Path | None, here: RankPlace | None, *, named: bool) -> None:
    """Refuse what --suite and --compare do not go with.

    Raises:
        InputError: a configuration, or several ranks.
    """
    for given, option in ((suite, "--suite"), (compare, "--compare")):
        if given is not None and (named or (suite and compare)):
            raise InputError(
                f"{option} reads all configurations from its file.",
                "Remove CONFIG, --model and --set; --suite and --compare exclude each other.",
                option,
            )
    if here is not None and (suite or compare):
        raise InputError(
            f"{'--suite' if suite else '--compare'} runs in one process, not on {here.ranks} ranks.",
            "Start memcalc without torchrun, or measure one configuration per torchrun command.",
        )


def _measure_suite(suite: Path, record: Path | None, device: str | None, python: str | None, form: str) -> None:
    """Measure a suite; an interruption prints how to continue."""
    from memcalc import api
    from memcalc.cli.output import print_json
    from memcalc.documents.measure import suite_document
    from memcalc.report.progress import shown_progress
    from memcalc.report.screen import make_screen
    from memcalc.report.screens.suite import draw_suite

    file = record or Path(f"{suite.stem}-records.jsonl")
    try:
        with shown_progress() as progress:
            outcome = api.measure_suite(suite, file, device=device, python=python, progress=progress)
    except KeyboardInterrupt:
        words = f"Interrupted: the measured runs are in {file}. Repeat the command to resume."
        sys.stderr.write(f"{harmless(words)}\n")
        raise
    if form == "json":
        print_json(suite_document(outcome))
    else:
        draw_suite(make_screen(), outcome)
    if outcome.unkept is not None:
        raise outcome.unkept


def _compare(records: Path, record: Path | None, traces: tuple[str, ...], python: str | None, form: str) -> None:
    """Traces of what was measured before."""
    from memcalc import api
    from memcalc.cli.output import print_json
    from memcalc.documents.measure import records_document
    from memcalc.report.progress import shown_progress
    from memcalc.report.screen import make_screen
    from memcalc.report.screens.suite import draw_compared

    _trace_here()
    with shown_progress() as progress:
        compared = api.compare_records(records, *traces, record=record, python=python, progress=progress)
    if form == "json":
        print_json(records_document(compared))
    else:
        draw_compared(make_screen(), compared)
    if compared.unkept is not None:
        raise compared.unkept


def _trace_here() -> None:
    """Fake tensors are traced in this process, which is the command's own: without the compiler, and its folder."""
    from memcalc.step.skip_compiler import without_compiler

    without_compiler()


def _traces(given: list[str] | None) -> tuple[str, ...]:
    """Return the traces that --trace requests; "none" requests no trace."""
    from memcalc.validation.predicted_vs_measured import check_traces

    traces = ("fake",) if given is None else tuple(name for name in given if name != "none")
    check_traces(traces)
    return traces
