"""`memcalc fit`: search for what fits on given GPUs."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from memcalc.cli.options import AcceptUnknown, Config, Gpu, Html, Set, Units
from memcalc.cli.shorthand import ShorthandCommand, takes_shorthands

GPUS_HELP = (
    "Number of GPUs; default: that of the configuration. With --minimize gpus: the most to try, by default 4,096."
)
HOLD_HELP = "Keep the configuration's value of this field in every layout, e.g. tensor_parallel. Repeatable."


def complete_hold(incomplete: str) -> list[str]:
    """Fields that can be held, for the shell's completion."""
    from memcalc.fitting.layouts import HOLDABLE

    return [field for field in HOLDABLE if field.startswith(incomplete)]


CommandClass = ShorthandCommand  # whose --lora and --recompute may stand without a value


@takes_shorthands(without=("gpus",))
def command(
    config: Config,
    *,
    overrides: Set = None,
    gpu: Gpu = None,
    gpus: Annotated[int | None, typer.Option("--gpus", "-n", metavar="N", help=GPUS_HELP)] = None,
    maximize: Annotated[
        Literal["micro_batch_size", "sequence_length", "layers", "parameters"] | None,
        typer.Option(help="Find only the largest value of this quantity."),
    ] = None,
    minimize: Annotated[
        Literal["gpus", "gpu_kind", "recompute"] | None,
        typer.Option(help="Find only the smallest value of this quantity."),
    ] = None,
    hold: Annotated[
        list[str] | None, typer.Option(metavar="FIELD", help=HOLD_HELP, autocompletion=complete_hold)
    ] = None,
    node: Annotated[
        int | None, typer.Option(metavar="N", help="GPUs per node; default: that of the vendor's own node.")
    ] = None,
    nic: Annotated[
        float | None,
        typer.Option(metavar="GBIT", help="Network Gbit/s per GPU; default: that of the vendor's own node."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Number of layouts to show.")] = 5,
    why: Annotated[bool, typer.Option("--why", help="List excluded layouts, and why.")] = False,
    html: Html = None,
    accept_unknown: AcceptUnknown = False,
    form: Annotated[Literal["table", "json"], typer.Option("--format", "-f")] = "table",
    units: Units = "GiB",
) -> None:
    """Find layouts, batch sizes, sequence lengths and GPUs that fit.

    The layouts over --gpus GPUs that fit, the cheapest first; the largest micro-batch and sequence; and, where the run
    does not fit as written, the smallest changes that make it fit.

    Exit code 0: something fits; 1: nothing does, or it cannot be said (see --accept-unknown).

    Example: memcalc fit llama-3-70b --gpu h100-80gb --gpus 64
    """
    from memcalc import api
    from memcalc.cli.output import WrittenFiles
    from memcalc.report.progress import shown_progress

    if html is not None:
        from memcalc.report.html_report import check_report

        check_report(html)
    with shown_progress() as progress:
        answer = api.fit(
            config,
            *(overrides or ()),
            gpu=gpu,
            gpus=gpus,
            maximize=maximize,
            minimize=minimize,
            hold=hold or (),
            progress=progress,
            node=node,
            nic_gbit=nic,
            top=top,
        )
    files = WrittenFiles()
    if html is not None:
        from memcalc.report.html_report import write_report
        from memcalc.report.views.runs import fit_view

        with files.writing():
            write_report(html, fit_view(answer, units, why=why))
    if form == "json":
        from memcalc.cli.output import print_json
        from memcalc.report.fit_document import fit_document

        print_json(fit_document(answer))
    else:
        from memcalc.report.fit import draw_fit
        from memcalc.report.screen import make_screen

        draw_fit(make_screen(), answer, units, why=why)
    files.complain()
    accepted = ("fits", "unknown") if accept_unknown else ("fits",)
    raise typer.Exit(0 if answer.verdict in accepted else 1)
