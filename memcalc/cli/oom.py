"""`memcalc oom`: explain an out-of-memory message."""

from __future__ import annotations

from typing import Annotated

import typer

from memcalc.cli.options import Gpu, Set, TableOrJson, Units, complete_config
from memcalc.cli.shorthand import with_shorthands

LOG_HELP = "A log of any size, plain, gzip or UTF-16; - for standard input."
CONFIG_HELP = "The configuration of the run, as for `memcalc estimate`; adds numbers to the remedies."


@with_shorthands(("budget",))
def command(
    log: Annotated[str, typer.Argument(metavar="LOG", help=LOG_HELP)],
    *,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", metavar="CONFIG", help=CONFIG_HELP, autocompletion=complete_config),
    ] = None,
    overrides: Set = None,
    gpu: Gpu = None,
    report: Annotated[
        int, typer.Option("--report", "-r", min=1, metavar="N", help="Explain the N-th report of the log.")
    ] = 1,
    form: TableOrJson = "table",
    units: Units = "GiB",
) -> None:
    """Explain an out-of-memory error from a log.

    Finds the messages of PyTorch (1.0 and later, every device), PaddlePaddle, TensorFlow and JAX in a log, and reports
    what used the memory, why the request failed, and what to try first.

    With --config: the estimated components at the failure, and the cheapest changes that fit.

    Exit code 2: there is no such message.

    Example: memcalc oom train.log --config run.yaml
    """
    from memcalc import api
    from memcalc.errors import InputError
    from memcalc.report.progress import shown_progress

    if config is None and (overrides or gpu):
        raise InputError("--set, --gpu and --budget need a configuration.", "Add --config CONFIG.")
    with shown_progress() as progress:
        diagnosis = api.oom(log, config, *(overrides or ()), gpu=gpu, report=report, progress=progress)
    if form == "json":
        from memcalc.cli.output import print_json
        from memcalc.documents.oom import diagnosis_document

        print_json(diagnosis_document(diagnosis))
    else:
        from memcalc.report.screen import make_screen
        from memcalc.report.screens.oom import draw_diagnosis

        draw_diagnosis(make_screen(), diagnosis, units)
