"""`memcalc check`: size every configuration of a repository, for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from memcalc.cli.options import Gpu, Units


def command(
    paths: Annotated[list[Path], typer.Argument(metavar="PATHS", help="Files, and folders to search for configs.")],
    gpu: Gpu = None,
    budget: Annotated[str | None, typer.Option(metavar="SIZE", help="The most a GPU may hold, e.g. 70GiB.")] = None,
    form: Annotated[
        Literal["table", "json", "github"], typer.Option("--format", "-f", help="github: annotations for Actions.")
    ] = "table",
    units: Units = "GiB",
) -> None:
    """Size all configs, for CI; fail if one does not fit.

    Exit code 0: all fit; 1: one does not; 2: one is broken, or there is nothing to check against.

    A file named is always checked. In a folder, YAML files with a `model:` block, `preset:` or `hf_config:` and
    Hugging Face config.json files are checked, and other frameworks' files that name a model; the rest is skipped and
    counted.

    Example: memcalc check configs/ --gpu h100-80gb --format github
    """
    from memcalc import api

    report = api.check(*paths, gpu=gpu, budget=budget)
    if form == "json":
        from memcalc.cli.output import print_json
        from memcalc.report.checks import check_document

        print_json(check_document(report))
    elif form == "github":
        from memcalc.cli.output import print_text
        from memcalc.report.checks import github_lines

        print_text("\n".join(github_lines(report, units)))
    else:
        from memcalc.report.checks import draw_checks
        from memcalc.report.screen import make_screen

        draw_checks(make_screen(), report, units)
    raise typer.Exit(report.exit_code)
