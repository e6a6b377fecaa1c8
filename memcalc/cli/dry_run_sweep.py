"""`memcalc dry-run --sweep`: the command at several micro-batch sizes."""

from __future__ import annotations

import os
import sys
from typing import Any, Unpack

import typer

from memcalc.cli.dry_run import exit_code_of
from memcalc.errors import InputError
from memcalc.nullcuda import DryRun, sweep
from memcalc.nullcuda.options import Options
from memcalc.units import Unit, format_bytes


def run_sweep(
    words: list[str],
    gpu: str,
    flag: str | None,
    sizes: str | None,
    *,
    form: str,
    units: Unit,
    assert_fits: bool,
    gpus: int,
    timeout: float | None,
    **options: Unpack[Options],
) -> None:
    """Run, report, and end with the exit code."""
    from memcalc.report.screens.dry_run import draw_sweep

    if flag is None:
        raise InputError(
            "--sweep needs the option of the command that sets the micro-batch size.",
            "Add --micro-batch-flag OPTION, e.g. --micro-batch-flag --per_device_train_batch_size.",
            "--micro-batch-flag",
        )

    def tell(size: int, found: DryRun) -> None:
        sys.stderr.write(f"{flag} {size}: {found.outcome}, {format_bytes(found.device_bytes, units)}\n")

    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 -- the command's output; its errors are shown
        found = sweep(
            words,
            gpu,
            flag,
            sizes=parse_sizes(sizes),
            gpus=gpus,
            timeout=timeout,
            stdout=nowhere,
            progress=tell,
            **options,
        )
    if form == "json":
        from memcalc.cli.output import print_json
        from memcalc.documents.dry_run import dry_run_sweep_document

        print_json(dry_run_sweep_document(found))
    else:
        from memcalc.report.screen import make_screen

        draw_sweep(make_screen(), found, units)
    if found.failed is not None:
        raise typer.Exit(exit_code_of(found.failed.exit_code or 1, asserted=assert_fits))
    raise typer.Exit(int(assert_fits and found.largest is None))


def parse_sizes(text: str | None) -> list[int]:
    """ "1,2,4" as numbers; none: []."""
    words: list[Any] = [] if text is None else text.split(",")
    try:
        return [int(word) for word in words]
    except ValueError:
        raise InputError(
            f"{text!r} is not a list of sizes.",
            "Write sizes with commas, e.g. --micro-batches 1,2,4.",
            "--micro-batches",
        ) from None
