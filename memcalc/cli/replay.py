"""`memcalc replay`: replay a run through an allocator and try other settings."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated, Literal

import typer

from memcalc.cli.options import Budget, Gpu, Plot, Set, TableOrJson, Units, complete_config

Policy = Literal["pytorch", "paddle-auto-growth", "paddle-naive-best-fit", "tensorflow", "ideal"]
SOURCE_HELP = "A file of events, a memory snapshot of PyTorch (.pickle, also .gz), or a configuration to trace."


def command(
    source: Annotated[
        str, typer.Argument(metavar="EVENTS|SNAPSHOT|CONFIG", help=SOURCE_HELP, autocompletion=complete_config)
    ],
    *,
    allocator: Annotated[Policy, typer.Option("--allocator", "-a", help="Allocator to replay.")] = "pytorch",
    alloc_conf: Annotated[
        str,
        typer.Option(
            metavar="SETTINGS",
            help="Allocator settings: the value of PYTORCH_CUDA_ALLOC_CONF, or the framework's flags.",
        ),
    ] = "",
    release: Annotated[
        str | None, typer.Option(metavar="X.Y", help="Version of the framework; default: the newest known.")
    ] = None,
    gpu: Gpu = None,
    budget: Budget = None,
    memory_fraction: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Memory limit of the process, as torch.cuda.set_per_process_memory_fraction sets."
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V,V", help="Try these values of a setting; `none`: unset. Repeatable."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also replay the other allocators.")] = False,
    device: Annotated[int | None, typer.Option(metavar="N", help="Device index in a snapshot.")] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the address space: .svg or .html.")] = None,
    plot: Plot = None,
    overrides: Set = None,
    form: TableOrJson = "table",
    units: Units = "GiB",
) -> None:
    """Replay a run's memory through an allocator.

    Shows reserved memory, fragmentation, where the run would run out of memory, and which setting would help.

    Example: memcalc replay snapshot.pickle --gpu a100-80gb --sweep max_split_size_mb=32,128,512,none --compare
    """
    from memcalc import api
    from memcalc.cli.output import WrittenFiles
    from memcalc.replaying.sources import kind_of
    from memcalc.report.progress import shown_progress

    if picture is not None:
        from memcalc.report.plots.files import check_place
        from memcalc.report.plots.segments import SUFFIXES

        check_place(picture, SUFFIXES)
    if kind_of(Path(source)) == "config":
        gc.set_threshold(700, 10, 10)  # a step that is traced makes garbage, unlike a recording and start-up
    with shown_progress() as progress:
        replay = api.replay(
            source,
            *(overrides or ()),
            allocator=allocator,
            alloc_conf=alloc_conf,
            release=release,
            gpu=gpu,
            budget=budget,
            memory_fraction=memory_fraction,
            sweep=sweep or (),
            compare=compare,
            device=device,
            progress=progress,
        )
    from memcalc.report.screens.replay import draw_replay, shown_point_text, subject
    from memcalc.report.tables.recorded_run import curve_tables

    files = WrittenFiles()
    with files.writing():
        if picture is not None:
            from memcalc.report.plots.segments import write_address_space

            title = f"{subject(replay)}: address space {shown_point_text(replay)}"
            write_address_space(picture, replay.segments, replay.owners, title, units)
        for path in plot or ():
            from memcalc.report.plots.files import write_plot

            write_plot(path, replay.curve, subject(replay), units, lambda: curve_tables(replay.curve, units))
    if form == "json":
        from memcalc.cli.output import print_json
        from memcalc.documents.replay import replay_document

        print_json(replay_document(replay))
    else:
        from memcalc.report.screen import make_screen

        draw_replay(make_screen(), replay, units)
    files.complain()
