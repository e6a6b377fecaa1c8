"""Options that commands share, one alias each, so that a flag has one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from memcalc.units import Unit


def complete_config(incomplete: str) -> list[str]:
    """Presets by name, for the shell's completion; files are completed by the shell itself."""
    from memcalc.spec.presets import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


def complete_gpu(incomplete: str) -> list[tuple[str, str]]:
    """Return GPU names for shell completion."""
    from memcalc.spec.hardware.gpus import all_gpus

    return [(gpu.name, gpu.label) for gpu in all_gpus() if gpu.name.startswith(incomplete)]


def complete_field(incomplete: str) -> list[str]:
    """Fields of the configuration, each with its equals sign, for the shell's completion."""
    from memcalc.spec.fields import all_field_names

    return sorted({f"{name}=" for name in all_field_names() if name.startswith(incomplete)})


def writable_report(path: Path | None) -> Path | None:
    """Refuse a file for a report that nothing could write, before time is spent on its content; so do the others."""
    if path is not None:
        from memcalc.report.html.html_report import SUFFIXES
        from memcalc.report.plots.files import check_place

        check_place(path, SUFFIXES)
    return path


def writable_picture(path: Path | None) -> Path | None:
    """Refuse a file that is not a picture, or that nothing could write."""
    if path is not None:
        from memcalc.report.plots.files import PICTURES, check_target

        check_target(path, PICTURES)
    return path


def writable_plots(paths: list[Path] | None) -> list[Path] | None:
    """Refuse files for a plot that nothing could write."""
    for path in paths or ():
        from memcalc.report.plots.files import check_target

        check_target(path)
    return paths


def writable_exports(paths: list[Path] | None) -> list[Path] | None:
    """Refuse files for other programs that nothing could write."""
    for path in paths or ():
        from memcalc.report.exports import SUFFIXES
        from memcalc.report.plots.files import check_target

        check_target(path, SUFFIXES)
    return paths


CONFIG_HELP = (
    "A Hugging Face hub id, a preset (see `memcalc models`), a YAML file, a config.json or its directory, another "
    "framework's configuration, or - for standard input."
)
SET_HELP = "Override a field, e.g. --set b=4 --set parallelism.zero_stage=3. Repeatable."

Config = Annotated[str, typer.Argument(metavar="CONFIG", help=CONFIG_HELP, autocompletion=complete_config)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="FIELD=VALUE", help=SET_HELP, autocompletion=complete_field),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        "-g",
        metavar="GPU",
        help="GPU to check against; see `memcalc gpus`. auto: the GPU of this machine.",
        autocompletion=complete_gpu,
    ),
]
BUDGET_HELP = "Memory limit per GPU, e.g. 12GiB; instead of --gpu or in addition."
Budget = Annotated[str | None, typer.Option("--budget", metavar="SIZE", help=BUDGET_HELP)]
Units = Annotated[Unit, typer.Option("--units", "-u", help="GiB is 2^30 bytes, GB is 10^9.")]
PLOT_HELP = (
    "Draw memory over the run: .png or .svg (extra plot), .html, a self-contained page, or .json, its data. Repeatable."
)
Plot = Annotated[list[Path] | None, typer.Option("--plot", metavar="FILE", help=PLOT_HELP, callback=writable_plots)]
EXPORT_HELP = (
    "Write the run for another program: .pickle, a memory snapshot for pytorch.org/memory_viz; .json, a Chrome trace "
    "for ui.perfetto.dev; .jsonl, memcalc's own events. Repeatable."
)
Export = Annotated[
    list[Path] | None, typer.Option("--export", metavar="FILE", help=EXPORT_HELP, callback=writable_exports)
]
HTML_HELP = "Write a report: one self-contained .html file that opens offline."
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help=HTML_HELP, callback=writable_report)]
AcceptUnknown = Annotated[bool, typer.Option("--accept-unknown", help="Exit 0 if the verdict is CANNOT SAY.")]
Device = Annotated[str | None, typer.Option("--device", metavar="cuda|cpu", help="Device to run on; default: the GPU.")]
Steps = Annotated[int, typer.Option("--steps", min=1, max=1000, help="Optimizer steps to run.")]
PYTHON_HELP = "Python interpreter with a CUDA build of torch, for --device null."
Python = Annotated[str | None, typer.Option("--python", metavar="PYTHON", help=PYTHON_HELP)]
TableOrJson = Annotated[Literal["table", "json"], typer.Option("--format", "-f")]
TableJsonOrMarkdown = Annotated[Literal["table", "json", "markdown"], typer.Option("--format", "-f")]
ResultFormat = Annotated[
    Literal["table", "json", "markdown", "csv"], typer.Option("--format", "-f", help="csv: the ledger's rows.")
]
