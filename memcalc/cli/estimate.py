"""`memcalc estimate`: size one run by formula."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from memcalc.cli.options import Config, Device, Gpu, Set, Units
from memcalc.errors import InputError

EXPLAIN_HELP = (
    "Open every number, or those of one component, into formula, factors and source. `parameters`: by module."
)


class CommandClass(TyperCommand):
    """Lets --explain stand alone: without a component it explains them all."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fill in "all" where --explain has no value of its own."""
        from memcalc.cli.explain import fill_in_explain

        return super().parse_args(ctx, fill_in_explain(args) if "--explain" in args else args)


def complete_component(incomplete: str) -> list[str]:
    """What --explain takes, for the shell's completion."""
    from memcalc.report.explanation import EXPLAINABLE

    return [word for word in EXPLAINABLE if word.startswith(incomplete)]


def command(
    config: Config,
    *,
    overrides: Set = None,
    gpu: Gpu = None,
    form: Annotated[
        Literal["table", "json", "markdown", "csv"], typer.Option("--format", "-f", help="csv: the ledger's rows.")
    ] = "table",
    units: Units = "GiB",
    explain: Annotated[
        str | None,
        typer.Option(metavar="[COMPONENT]", help=EXPLAIN_HELP, autocompletion=complete_component),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Report this pipeline stage instead of the worst one.")
    ] = None,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Add one line for each pipeline stage.")] = False,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Play all requests to PyTorch's allocator: reserved memory, rests of blocks."),
    ] = False,
    alloc_conf: Annotated[
        str, typer.Option("--alloc-conf", metavar="SETTINGS", help="With --rehearse: as PYTORCH_CUDA_ALLOC_CONF.")
    ] = "",
    measure: Annotated[bool, typer.Option("--measure", help="Also run the step, and set both side by side.")] = False,
    device: Device = None,
) -> None:
    """Size one training run by formula.

    Shows whether it fits, its peak, what the peak is made of, and when it comes.

    Example: memcalc estimate llama-3-8b --gpu h100-80gb --set zero_stage=3 --set data_parallel=8
    """
    from memcalc import api
    from memcalc.cli.render import print_sizing

    if explain is not None:
        from memcalc.report.explanation import explainable

        explain = explainable(explain)
    spec = api.load(config, *(overrides or ()), gpu=gpu)
    if alloc_conf and not rehearse:
        raise InputError(
            f"--alloc-conf {alloc_conf}: by formula no setting of the allocator is known.",
            "Add --rehearse.",
            "--alloc-conf",
        )
    result = api.estimate(spec, rehearse=rehearse, alloc_conf=alloc_conf)
    if not rehearse:
        from memcalc.cli.near import with_hint

        result = with_hint(result)
    measurement = api.measure(spec, device=device) if measure else None
    if rank is not None:
        from memcalc.cli.ranks import with_headline

        result = with_headline(result, rank)
    print_sizing(result, form, units, all_ranks=all_ranks, explain=explain, measurement=measurement)
