"""`memcalc estimate`: the memory of one run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memcalc.cli.options import Config, Device, Gpu, Html, Plot, ResultFormat, Set, Units
from memcalc.cli.shorthand import ShorthandCommand, with_shorthands

if TYPE_CHECKING:
    from memcalc.ledger.result import Result
    from memcalc.units import Unit

EXPLAIN_HELP = (
    "Show the rows, formulas and sources of all components, or of one; `parameters`: by module; `recipe`: the bytes "
    "per parameter of each recipe."
)


class EstimateCommand(ShorthandCommand):
    """Allows --explain without a component, which explains all of them; the option parser has no optional values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fill in "all" where --explain has no value."""
        return super().parse_args(ctx, fill_in_explain(args) if "--explain" in args else args)


def fill_in_explain(args: list[str]) -> list[str]:
    """Return the arguments with "all" after every --explain without a value."""
    filled: list[str] = []
    for index, argument in enumerate(args):
        filled.append(argument)
        if argument == "--":
            return filled + args[index + 1 :]
        if argument == "--explain" and not _is_word(args[index + 1 : index + 2]):
            filled.append("all")
    return filled


def _is_word(following: list[str]) -> bool:
    """Return whether an argument is the value of --explain, even if misspelled, not an option or the CONFIG."""
    from memcalc.report.tables.explanation import EXPLAINABLE
    from memcalc.spec.presets import preset_names

    if not following or following[0].startswith("-"):
        return False
    word = following[0]
    if word.lower().replace("-", "_") in EXPLAINABLE:
        return True
    is_config = word in preset_names() or "." in word or "/" in word or Path(word).exists()
    return not is_config


CommandClass = EstimateCommand  # see memcalc/cli/tree.py


def complete_component(incomplete: str) -> list[str]:
    """Return the values of --explain that begin with the typed text, for the shell's completion."""
    from memcalc.report.tables.explanation import EXPLAINABLE

    return [word for word in EXPLAINABLE if word.startswith(incomplete)]


@with_shorthands()
def command(
    config: Config,
    *,
    overrides: Set = None,
    gpu: Gpu = None,
    form: ResultFormat = "table",
    units: Units = "GiB",
    explain: Annotated[
        str | None,
        typer.Option(metavar="[COMPONENT]", help=EXPLAIN_HELP, autocompletion=complete_component),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Report this pipeline stage instead of the worst one.")
    ] = None,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Add one line for each pipeline stage.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Show totals, phases, published formulas, notes and limits, too.")
    ] = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="Show the verdict, its reason, totals, notes and limits only.")
    ] = False,
    rehearse: Annotated[bool, typer.Option("--rehearse", hidden=True)] = False,
    alloc_conf: Annotated[
        str | None,
        typer.Option(
            "--alloc-conf", metavar="SETTINGS", help="Value of PYTORCH_CUDA_ALLOC_CONF; short for --set alloc_conf=."
        ),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option("--trace/--no-trace", help="Trace models without formulas in a child process, or reject them."),
    ] = True,
    plot: Plot = None,
    html: Html = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also run the step, and compare.")] = False,
    device: Device = None,
) -> None:
    """Estimate the peak memory of a training run or generation.

    Shows whether the run fits, its peak, the components of the peak, and its phase.

    Example: memcalc estimate llama-3-8b --gpu h100-80gb --set zero_stage=3 --set data_parallel=8
    """
    from memcalc import api
    from memcalc.cli.output import WrittenFiles
    from memcalc.cli.render import print_sizing
    from memcalc.report.progress import shown_progress
    from memcalc.report.screen import Details

    if explain is not None:
        from memcalc.report.tables.explanation import explainable

        explain = explainable(explain)
    spec = api.load(config, *(overrides or ()), gpu=gpu)
    with shown_progress() as progress:
        result = api.estimate(spec, alloc_conf=alloc_conf, trace=trace, progress=progress).replayed
    measurement = api.measure(spec, device=device) if measure else None
    if rank is not None:
        from memcalc.cli.ranks import with_headline

        result = with_headline(result, rank)
    files = WrittenFiles()
    if plot:
        with files.writing():
            _write_plots(result, plot, units)
    reason = other = None
    if (html is not None or form in ("table", "markdown")) and spec.inference is None and result.source == "estimate":
        from memcalc.verdict.reasons import reason_of

        reason = reason_of(result)
        if form == "table":
            from memcalc.verdict.other_modules import with_transformers

            other = with_transformers(result)
    advice = _advice(result, config, overrides or (), gpu)
    if html is not None:
        from memcalc.report.html.html_report import write_report
        from memcalc.report.views.estimate import estimate_sections, estimate_view
        from memcalc.report.views.timeline import memory_section

        with files.writing():
            timeline = [memory_section(result, units)]
            sections = estimate_sections(result, units, timeline, reason=reason, advice=advice)
            write_report(html, estimate_view(result, sections))
    details = Details(all_ranks, explain, brief, reason, other, advice)
    short = not (full or brief or all_ranks or explain)
    print_sizing(result, form, units, details, short=short, measurement=measurement)
    files.complain()


def _write_plots(result: Result, plots: Sequence[Path], unit: Unit) -> None:
    """Draw memory over three steps of the estimated run."""
    from memcalc.report.labels import rank_text
    from memcalc.report.plots.files import write_plot
    from memcalc.report.screens.verdict import subject
    from memcalc.report.tables.phase_log import phase_log_table
    from memcalc.verdict.timeline import timeline_of

    course = timeline_of(result.spec, result.headline)
    stage = [rank_text(result.headline.rank)] if len(result.ranks) > 1 else []
    title = ", ".join((subject(result).run, *stage))
    for path in plots:
        write_plot(path, course, title, unit, lambda: [phase_log_table(course, unit)], result.source)


def _advice(result: Result, config: str, overrides: Sequence[str], gpu: str | None) -> str:
    """Return the command to try next if the run does not fit, or if that is not certain."""
    if result.spec.inference is not None:
        return ""
    if result.verdict == "unknown" and result.source == "estimate":
        from memcalc.spec.hardware.gpus import find_gpu
        from memcalc.spec.hardware.kernels import missing_kernel
        from memcalc.spec.towers import tower_trains

        if result.spec.training.optimizer == "galore":  # `dry-run` answers no cuSOLVER calls
            return f"To be certain, run a step on the GPU: `memcalc measure {config}`."
        if result.interval is not None and result.interval.is_late:
            ends = "a dry run has CUDA streams that are on time, and with `--delayed-events` late ones"
            return f"To be certain, run some steps on the GPUs: {ends}."
        command = f"memcalc dry-run --gpu {gpu or 'GPU'} -- COMMAND"
        measured = f"To be certain, run your training command without a GPU: `{command}`."
        training, named = result.spec.training, result.spec.hardware.gpu
        if tower_trains(result.spec.model, training):
            return f"If the vision tower does not train, add `--set vision_tower=frozen`. {measured}"
        if named is not None and missing_kernel(training.dtype, training.attention, find_gpu(named)):
            in_fp16 = "`--set dtype=fp16 --set attention=memory-efficient`"
            return f"Name a kernel that this GPU has: `--set attention=eager`, or in fp16 {in_fp16}. {measured}"
        return measured
    if result.verdict != "does-not-fit" or config == "-":
        return ""
    words = ["memcalc", "fit", config, *(("--gpu", gpu) if gpu else ())]
    words += [word for override in overrides for word in ("--set", override)]
    return f"Run `{shlex.join(words)}` for batches, layouts and changes that fit."
