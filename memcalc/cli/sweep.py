"""`memcalc sweep`: a grid of configurations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from memcalc.cli.options import Budget, Gpu, Set, Units, complete_config
from memcalc.units import Unit

VARY_HELP = "A field and its values: b=1..64, s=1024..8192..1024, recompute=none,selective,full. Repeatable."
NODE_HELP = "Exclude layouts with tensor parallelism over more GPUs than a node has."
REPLAY_HELP = "Also replay the N configurations closest to the GPU's usable memory."
OUTPUT_HELP = "Also write every configuration: .csv, .json, or .parquet (needs pyarrow). Repeatable."
CONFIG_HELP = "A configuration as for `memcalc estimate`; with --by dry-run: -- COMMAND that contains {FIELD}."
BY_HELP = (
    "formulas: estimate each cell. trace: run it on fake tensors; null: on the null device; dry-run: run COMMAND. Each "
    "of these runs in a separate process."
)
CELLS_HELP = "Keep the result of each run in this file, and skip the runs that are in the file."
WORKERS_HELP = "Processes at a time; default: the cores of this machine."
SCHEDULER_HELP = "Run on an existing Dask cluster, such as tcp://10.0.0.1:8786."
STEPS_HELP = "Optimizer steps of each run; default: 3 for traces, all for commands."
PLOT_HELP = "Draw the maps with the boundary of what fits: .svg or .html. Repeatable."

CELLS = Path("memcalc-cells.jsonl")


def command(
    words: Annotated[list[str], typer.Argument(metavar="CONFIG", help=CONFIG_HELP, autocompletion=complete_config)],
    *,
    by: Annotated[Literal["formulas", "trace", "null", "dry-run"], typer.Option(help=BY_HELP)] = "formulas",
    vary: Annotated[list[str] | None, typer.Option("--vary", metavar="FIELD=VALUES", help=VARY_HELP)] = None,
    overrides: Set = None,
    gpu: Gpu = None,
    budget: Budget = None,
    gpus_per_node: Annotated[int | None, typer.Option(metavar="N", min=1, help=NODE_HELP)] = None,
    replay: Annotated[int, typer.Option(metavar="N", min=0, help=REPLAY_HELP)] = 0,
    form: Annotated[Literal["table", "json", "csv"], typer.Option("--format", "-f")] = "table",
    units: Units = "GiB",
    listed: Annotated[bool, typer.Option("--all", help="List every configuration.")] = False,
    output: Annotated[list[Path] | None, typer.Option("--output", "-o", metavar="FILE", help=OUTPUT_HELP)] = None,
    plot: Annotated[list[Path] | None, typer.Option("--plot", metavar="FILE", help=PLOT_HELP)] = None,
    cells: Annotated[Path, typer.Option(metavar="FILE", help=CELLS_HELP)] = CELLS,
    workers: Annotated[int | None, typer.Option(metavar="N", min=1, help=WORKERS_HELP)] = None,
    scheduler: Annotated[str | None, typer.Option(metavar="ADDRESS", help=SCHEDULER_HELP)] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help=STEPS_HELP)] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PYTHON", help="Python interpreter with a CUDA build of torch (--by null).")
    ] = None,
    gpus: Annotated[int, typer.Option(metavar="N", min=1, help="GPUs of the simulated machine (--by dry-run).")] = 1,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0.1, help="End each run after S seconds (--by dry-run).")
    ] = None,
    skip_init: Annotated[bool, typer.Option("--skip-init", help="Skip weight initialization (--by dry-run).")] = False,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Build from_pretrained models without a checkpoint (--by dry-run).")
    ] = False,
) -> None:
    """Estimate or run a grid of configurations, and show what fits.

    Allocated memory is that of `memcalc estimate`. Bounds decide what fits and what does not; the rest is close.
    The Pareto front is replayed, as `estimate` replays every run. Invalid configurations are excluded, with the reason.

    With --by trace, null or dry-run each cell is a run. Its result is saved when it ends: the same command resumes an
    interrupted sweep.

    Example: memcalc sweep llama-3-8b --gpu h100-80gb --vary b=1..32 --vary recompute=none,full

    Example: memcalc sweep --by dry-run --gpu h100-80gb --vary batch=1,2,4 -- python train.py --batch-size {batch}
    """
    from memcalc.cli.cells import of_formulas, of_runs, run_cells, show_cells, single

    if budget is not None:
        from memcalc.spec.hardware.gpus import with_budget

        if by == "dry-run":
            gpu = with_budget(gpu, budget)
        else:  # the configuration may name the GPU
            overrides = [f"hardware.budget={budget}", *(overrides or ())]
    traced = {"steps": steps, "python": python}
    dry = {"steps": steps, "gpus": gpus, "timeout": timeout, "skip_init": skip_init, "random_weights": random_weights}
    place = {"workers": workers, "scheduler": scheduler}
    if by == "formulas":
        of_runs(traced | dry | place | {"cells": cells if cells != CELLS else None})
        files = {"output": output or (), "plot": plot or ()}
        _estimate(
            single(words),
            vary or (),
            overrides or (),
            gpu,
            **files,
            form=form,
            units=units,
            listed=listed,
            replay=replay,
            gpus_per_node=gpus_per_node,
        )
        return
    of_formulas({"replay": replay, "gpus_per_node": gpus_per_node, "plot": plot}, output or ())
    found = run_cells(by, words, vary or (), overrides or (), gpu, file=cells, traced=traced, dry=dry, place=place)
    show_cells(found, cells, form, units, output or (), listed=listed)


def _estimate(
    config: str,
    vary: Sequence[str],
    overrides: Sequence[str],
    gpu: str | None,
    output: Sequence[Path],
    plot: Sequence[Path],
    *,
    form: str,
    units: Unit,
    listed: bool,
    replay: int,
    gpus_per_node: int | None,
) -> None:
    """Estimate a grid of configurations, and print or write it."""
    from memcalc import api
    from memcalc.cli.output import WrittenFiles
    from memcalc.errors import InputError
    from memcalc.report.plots.files import check_place
    from memcalc.report.progress import shown_progress
    from memcalc.report.sweeps.files import PICTURES, check_output, write_heatmaps, write_output
    from memcalc.sweeping.vary_option import parse_axes

    for path in output:
        check_output(path)
    for path in plot:
        check_place(path, PICTURES)
    grid = parse_axes(vary)
    with shown_progress() as progress:
        table = api.sweep(
            config, grid, *overrides, gpu=gpu, gpus_per_node=gpus_per_node, replay=replay, progress=progress
        )
    if not table.possible.any():
        several = f"none of {len(table):,} configurations is valid; the first"
        raise InputError(f"{several if len(table) > 1 else 'the configuration is invalid'}: {table.reason(0)}")
    first = table.spec(int(table.possible.argmax()))
    name = first.name
    files = WrittenFiles()
    for path in output:
        with files.writing():
            write_output(path, table, name, first.origin.notes)
    gpu_spec = None if "hardware.gpu" in table.grid.fields else first.hardware.gpu
    for path in plot:
        with files.writing():
            write_heatmaps(path, table, f"{name} on {gpu_spec}" if gpu_spec else name, units)
    if form == "json":
        from memcalc.cli.output import print_json
        from memcalc.documents.sweep import sweep_document

        print_json(sweep_document(table, name, first.origin.notes))
    elif form == "csv":
        from memcalc.cli.output import print_text
        from memcalc.report.sweeps.files import sweep_csv

        print_text(sweep_csv(table))
    else:
        from memcalc.report.screen import make_screen
        from memcalc.report.sweeps.screen import draw_sweep

        draw_sweep(make_screen(), table, name, _gpu(gpu_spec), units, listed=listed, notes=first.origin.notes)
    files.complain()


def _gpu(gpu: str | None) -> str:
    if gpu is None:
        return ""
    from memcalc.spec.hardware.gpus import find_gpu

    return find_gpu(gpu).label
