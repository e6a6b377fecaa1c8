"""`memcalc measure`: run the step on a device that is there."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated, Literal

import typer

from memcalc.cli.options import CONFIG_HELP, Device, Set, Units, complete_config
from memcalc.errors import InputError


def command(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help=CONFIG_HELP, autocompletion=complete_config)
    ] = None,
    *,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="A preset, in place of CONFIG.", autocompletion=complete_config)
    ] = None,
    overrides: Set = None,
    device: Device = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Optimizer steps to run.")] = 3,
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep every figure in this file.")] = None,
    form: Annotated[Literal["table", "json"], typer.Option("--format", "-f")] = "table",
    units: Units = "MiB",
) -> None:
    """Run the training step and compare with the estimate.

    Phase by phase: what the device held, beside what the formulas said. Needs torch.

    Example: memcalc measure gpt2 --device cpu --steps 3
    """
    from memcalc import api

    if (config is None) == (model is None):
        raise InputError("measure takes one configuration.", "Give either CONFIG or --model NAME, e.g. `measure gpt2`.")
    gc.set_threshold(700, 10, 10)  # a running step makes garbage, unlike the start-up that main() tunes for
    spec = api.load(config or model or "", *(overrides or ()))
    measurement = api.measure(spec, device=device, steps=steps, record=record)
    measured = measurement.to_result()
    if form == "json":
        from memcalc.cli.output import print_json
        from memcalc.ledger.document import document

        print_json(document(measured))
        return
    from memcalc.report.comparison import draw_comparison
    from memcalc.report.screen import make_screen

    draw_comparison(make_screen(), (api.estimate(spec), measured), units)
