"""`memcalc gpus`: the table of GPUs."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from memcalc.cli.options import Units


def command(
    form: Annotated[Literal["table", "json", "markdown"], typer.Option("--format", "-f")] = "table",
    units: Units = "GiB",
) -> None:
    """List the GPUs with their memory.

    Advertised memory, total memory in nvidia-smi, and memory usable by frameworks, which verdicts use.
    """
    from memcalc.cli.render import print_listing
    from memcalc.report.screens.listings import gpu_rows, gpu_table

    rows = gpu_rows()
    print_listing(form, rows, gpu_table(rows, units))
