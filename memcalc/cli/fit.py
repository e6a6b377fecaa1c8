"""`memcalc fit`: search for what fits on given GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memcalc.cli.options import AcceptUnknown, Config, Gpu, Html, Set, TableOrJson, Units, writable_picture
from memcalc.cli.shorthand import ShorthandCommand, with_shorthands

if TYPE_CHECKING:
    from memcalc.search.exported_layout import ExportedLayout
    from memcalc.search.result import FitResult

GPUS_HELP = (
    "Number of GPUs; default: as in the configuration. With --minimize gpus or cost: the most to try, by default 4,096."
)
PLOT_HELP = "Draw what fits, the memory of each layout and its cost: .png or .svg (extra plot)."
PRICE_HELP = "Price of one GPU for one hour, e.g. h100-80gb=2.10. Repeatable."
HOLD_HELP = "Field to keep as configured in every layout, e.g. tensor_parallel. Repeatable."


def complete_hold(incomplete: str) -> list[str]:
    """Fields that can be held, for the shell's completion."""
    from memcalc.search.layouts import HOLDABLE

    return [field for field in HOLDABLE if field.startswith(incomplete)]


CommandClass = ShorthandCommand  # its --lora and --recompute need no value


@with_shorthands(without=("gpus",))
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
        Literal["gpus", "gpu_kind", "recompute", "cost"] | None,
        typer.Option(help="Find only the smallest value of this quantity; cost: by --price."),
    ] = None,
    price: Annotated[list[str] | None, typer.Option(metavar="GPU=PRICE", help=PRICE_HELP)] = None,
    hold: Annotated[
        list[str] | None, typer.Option(metavar="FIELD", help=HOLD_HELP, autocompletion=complete_hold)
    ] = None,
    node: Annotated[
        int | None, typer.Option(metavar="N", help="GPUs per node; default: as in the vendor's server.")
    ] = None,
    nic: Annotated[
        float | None,
        typer.Option(metavar="GBIT", help="Network Gbit/s per GPU; default: as in the vendor's server."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Number of layouts to show.")] = 5,
    why: Annotated[bool, typer.Option("--why", help="List excluded layouts and the reasons.")] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the first layout that the program of --as can run.")
    ] = None,
    program: Annotated[
        Literal["accelerate", "deepspeed", "torchtitan", "megatron", "axolotl", "trainer"] | None,
        typer.Option("--as", help="Program to write the file of --write for."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help=PLOT_HELP, callback=writable_picture)] = None,
    html: Html = None,
    accept_unknown: AcceptUnknown = False,
    form: TableOrJson = "table",
    units: Units = "GiB",
) -> None:
    """Find layouts, batch sizes, sequence lengths and GPUs that fit.

    Lists the layouts over --gpus GPUs that fit, the cheapest first, the largest micro-batch and sequence, and, if the
    run does not fit as configured, the smallest changes that make it fit.

    Exit code 0: something fits; 1: nothing does, or memcalc cannot say (see --accept-unknown).

    Example: memcalc fit llama-3-70b --gpu h100-80gb --gpus 64
    """
    from memcalc import api
    from memcalc.cli.output import WrittenFiles
    from memcalc.report.progress import shown_progress
    from memcalc.search.offers import parse_prices

    if write is not None or program is not None:
        _check_target(write, program, searched=maximize or minimize)
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
            prices={} if not price else parse_prices(price),
        )
    files = WrittenFiles()
    exported = None if write is None or program is None else _exported(answer, program, write, config)
    written: ExportedLayout | None = None
    if exported is not None and write is not None:
        from memcalc.files import write_text

        with files.writing():
            write_text(write, exported.file.text)
            written = exported
    if plot is not None:
        from memcalc.report.plots.bars import save_bars
        from memcalc.report.plots.fit_bars import fit_blocks, fit_title

        with files.writing():
            save_bars(plot, fit_title(answer, units), fit_blocks(answer, units))
    if html is not None:
        from memcalc.report.html.html_report import write_report
        from memcalc.report.views.runs import fit_view

        with files.writing():
            write_report(html, fit_view(answer, units, why=why))
    if form == "json":
        from memcalc.cli.output import print_json
        from memcalc.documents.fit import fit_document

        print_json(fit_document(answer, written, write))
    else:
        from memcalc.report.screen import make_screen
        from memcalc.report.screens.fit import draw_fit

        draw_fit(make_screen(), answer, units, why=why)
        if written is not None and write is not None:
            from memcalc.cli.output import print_text
            from memcalc.report.screens.fit import written_text

            print_text(written_text(written, write, units))
    files.complain()
    accepted = ("fits", "unknown") if accept_unknown else ("fits",)
    raise typer.Exit(0 if answer.verdict in accepted else 1)


def _check_target(write: Path | None, program: str | None, *, searched: str | None) -> None:
    """Refuse what cannot be written before anything is searched.

    Raises:
        InputError: one of the two options is missing, the file's suffix is wrong, or no layouts are searched.
    """
    from memcalc.errors import InputError
    from memcalc.exporters.completion import named_program
    from memcalc.report.plots.files import check_place

    if write is None or program is None:
        raise InputError("--write and --as need each other.", "Write --write FILE --as accelerate.", "fit")
    named_program(program, write)
    check_place(write, (write.suffix.lower(),))
    if searched not in (None, "gpus", "cost"):
        raise InputError(
            f"--write writes a layout, but the search for {searched} lists no layouts.",
            "Leave --write out, or search for layouts.",
            "--write",
        )


def _exported(answer: FitResult, program: str, file: Path, config: str) -> ExportedLayout | None:
    """Return the first layout of the table that fits in the program; None, with a warning, if no layout fits.

    Raises:
        InputError: the program can run none of them.
    """
    from memcalc.cli.messages import show_warning
    from memcalc.search.exported_layout import exported_layout

    if not answer.best:
        show_warning(f"no layout fits, so {file} is not written.")
        return None
    return exported_layout([best.result for best in answer.best], program, file, config)
