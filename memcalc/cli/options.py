"""Options that commands share, one alias each, so that a flag has one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
Plot = Annotated[list[Path] | None, typer.Option("--plot", metavar="FILE", help=PLOT_HELP)]
HTML_HELP = "Write a report: one self-contained .html file that opens offline."
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help=HTML_HELP)]
AcceptUnknown = Annotated[bool, typer.Option("--accept-unknown", help="Exit 0 if the verdict is CANNOT SAY.")]
Device = Annotated[str | None, typer.Option("--device", metavar="cuda|cpu", help="Device to run on; default: the GPU.")]
