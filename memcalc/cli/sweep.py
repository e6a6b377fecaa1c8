"""`memcalc sweep`: a grid of configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from memcalc.cli.options import Config, Gpu, Set, Units

VARY_HELP = "A field and its values: b=1..64, s=1024..8192..1024, recompute=none,selective,full. Repeatable."
NODE_HELP = "Exclude layouts with tensor parallelism over more GPUs than a node has."
REPLAY_HELP = "Also replay the N configurations closest to the GPU's usable memory."
OUTPUT_HELP = "Also write every configuration: .csv, .json, or .parquet (needs pyarrow). Repeatable."
PLOT_HELP = "Draw the maps with the boundary of what fits: .svg or .html. Repeatable."


def command(
    config: Config,
    *,
    vary: Annotated[list[str] | None, typer.Option("--vary", metavar="FIELD=VALUES", help=VARY_HELP)] = None,
    overrides: Set = None,
    gpu: Gpu = None,
    gpus_per_node: Annotated[int | None, typer.Option(metavar="N", min=1, help=NODE_HELP)] = None,
    replay: Annotated[int, typer.Option(metavar="N", min=0, help=REPLAY_HELP)] = 0,
    form: Annotated[Literal["table", "json", "csv"], typer.Option("--format", "-f")] = "table",
    units: Units = "GiB",
    listed: Annotated[
        bool, typer.Option("--all", help="List every configuration, regardless of their number.")
    ] = False,
    output: Annotated[list[Path] | None, typer.Option("--output", "-o", metavar="FILE", help=OUTPUT_HELP)] = None,
    plot: Annotated[list[Path] | None, typer.Option("--plot", metavar="FILE", help=PLOT_HELP)] = None,
) -> None:
    """Estimate a grid of configurations and show what fits.

    Each has the allocated memory of `memcalc estimate`. Bounds decide what fits and what does not; the rest is close.
    The Pareto front is replayed, as `estimate` replays every run. What is invalid is excluded, with the reason.

    Example: memcalc sweep llama-3-8b --gpu h100-80gb --vary b=1..32 --vary recompute=none,full
    """
    from memcalc import api
    from memcalc.cli.output import WrittenFiles
    from memcalc.engine.varying import parse_axes
    from memcalc.errors import InputError
    from memcalc.report.plots.files import check_place
    from memcalc.report.progress import shown_progress
    from memcalc.report.sweeps.files import PICTURES, check_output, write_output, write_picture

    for path in output or ():
        check_output(path)
    for path in plot or ():
        check_place(path, PICTURES)
    grid = parse_axes(vary or ())
    with shown_progress() as progress:
        table = api.sweep(
            config, grid, *(overrides or ()), gpu=gpu, gpus_per_node=gpus_per_node, replay=replay, progress=progress
        )
    if not table.possible.any():
        several = f"none of {len(table):,} configurations is valid; the first"
        raise InputError(f"{several if len(table) > 1 else 'the configuration is invalid'}: {table.reason(0)}")
    first = table.spec(int(table.possible.argmax()))
    name = first.name
    files = WrittenFiles()
    for path in output or ():
        with files.writing():
            write_output(path, table, name, first.origin.notes)
    card = None if "hardware.gpu" in table.grid.fields else first.hardware.gpu
    for path in plot or ():
        with files.writing():
            write_picture(path, table, f"{name} on {card}" if card else name, units)
    if form == "json":
        from memcalc.cli.output import print_json
        from memcalc.report.sweeps.files import sweep_document

        print_json(sweep_document(table, name, first.origin.notes))
    elif form == "csv":
        from memcalc.cli.output import print_text
        from memcalc.report.sweeps.files import sweep_csv

        print_text(sweep_csv(table))
    else:
        from memcalc.report.screen import make_screen
        from memcalc.report.sweeps.screen import draw_sweep

        draw_sweep(make_screen(), table, name, _card(card), units, listed=listed, notes=first.origin.notes)
    files.complain()


def _card(gpu: str | None) -> str:
    if gpu is None:
        return ""
    from memcalc.spec.cards import find_card

    return find_card(gpu).label
