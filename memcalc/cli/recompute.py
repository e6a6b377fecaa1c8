"""`memcalc recompute`: plan activation recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memcalc.cli.options import AcceptUnknown, Config, Gpu, Html, Python, Set, TableOrJson, Units, writable_picture
from memcalc.errors import InputError
from memcalc.files import write_text
from memcalc.units import Unit

if TYPE_CHECKING:
    from memcalc.recomputation.chain_file import ChainPlanning

MOST_DIGITS = 6  # of a position


def command(
    config: Config,
    *,
    overrides: Set = None,
    gpu: Gpu = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory limit per GPU, e.g. 70GiB; default: that of the GPU.")
    ] = None,
    strategy: Annotated[
        Literal["optimal", "selective", "none", "every-layer", "sqrt", "every-k", "smallest"],
        typer.Option(help="Strategy that chooses what to recompute."),
    ] = "optimal",
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Plan of a chain to evaluate: numbers of the blocks that save their outputs."
        ),
    ] = None,
    maximize: Annotated[
        Literal["micro_batch_size", "batch"] | None,
        typer.Option(help="Find the largest value for which a plan fits; batch is for chains."),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Also trace the planned step, on every --device; needs torch."),
    ] = False,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="fake|null", help="For --verify; default: fake, and null where it is installed. Repeatable."
        ),
    ] = None,
    python: Python = None,
    host_bandwidth: Annotated[
        float,
        typer.Option(
            metavar="GB/S", min=0.001, help="Bandwidth of the link to the host, for the comparison with offload."
        ),
    ] = 25.0,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw memory against compute: .png or .svg (extra plot).", callback=writable_picture
        ),
    ] = None,
    html: Html = None,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the configuration with the plan.")] = None,
    accept_unknown: AcceptUnknown = False,
    form: TableOrJson = "table",
    units: Units = "GiB",
) -> None:
    """Plan which activations to save and which to recompute.

    Finds the cheapest plan with which the run fits its GPU or the budget, by allocator replay, and prints its cost, its
    peak, the lines to paste into the training code, and the plan for the configuration.

    Exit code 1: no plan fits, or memcalc cannot say (unless --accept-unknown).

    Example: memcalc recompute llama-3-8b --gpu h100-80gb --set recipe=pure --set b=2
    """
    from memcalc import api
    from memcalc.cli.output import WrittenFiles
    from memcalc.report.progress import shown_progress

    if api.describes_chain(config):
        if overrides or verify or plot or html or write:
            raise InputError(
                f"{config} is a chain: --set, --verify, --plot, --html and --write need a configuration.",
                "Leave these options out.",
                "recompute",
            )
        saved = None if plan is None else _positions(plan)
        planning = api.recompute_chain(
            config, gpu=gpu, budget=budget, strategy=strategy, saved=saved, maximize=maximize is not None
        )
        _print_chain(planning, form, units)
        return
    if plan is not None:
        raise InputError(
            f"--plan needs a chain, but {config} is a configuration.",
            "Set the plan of a configuration with --set recompute=.",
            "--plan",
        )
    with shown_progress() as progress:
        planned = api.recompute(
            config,
            *(overrides or ()),
            gpu=gpu,
            budget=budget,
            strategy=strategy,
            maximize=maximize is not None,
            host_gb_per_second=host_bandwidth,
            progress=progress,
        )
        checked = api.verified(planned, tuple(device or ("fake", "null")), python, progress) if verify else []
    files = WrittenFiles()
    with files.writing():
        if write is not None:
            from memcalc.recomputation.recommendation import planned_yaml

            write_text(write, planned_yaml(planned))
        if plot is not None:
            from memcalc.report.plots.pareto_plot import save_front

            save_front(plot, planned, units)
        if html is not None:
            from memcalc.report.html.html_report import write_report
            from memcalc.report.views.runs import recompute_view
            from memcalc.report.views.timeline import memory_section

            sections = [memory_section(planned.result, units)]
            write_report(html, recompute_view(planned, units, checked, sections))
    if form == "json":
        from memcalc.cli.output import print_json
        from memcalc.documents.recompute import planning_document

        print_json(planning_document(planned, checked))
    else:
        from memcalc.report.screen import make_screen
        from memcalc.report.screens.recompute import draw_planning

        draw_planning(make_screen(), planned, units, checked)
    files.complain()
    if planned.verdict.answer == "unknown" and not accept_unknown:
        raise typer.Exit(1)


def _positions(plan: str) -> list[int]:
    """Return the numbers of --plan.

    Raises:
        InputError: it is not a list of whole numbers.
    """
    words = plan.split(",")
    if not all(word.strip().isdecimal() and len(word) <= MOST_DIGITS for word in words):
        raise InputError(
            f"{plan!r} is not a list of positions.",
            "Write the numbers of the blocks that save their outputs, e.g. 5,10,15.",
            "--plan",
        )
    return [int(word) for word in words]


def _print_chain(planning: ChainPlanning, form: str, units: Unit) -> None:
    if form == "json":
        from memcalc.cli.output import print_json
        from memcalc.documents.recompute import chain_document

        print_json(chain_document(planning))
    else:
        from memcalc.report.screen import make_screen
        from memcalc.report.screens.chain import draw_chain

        draw_chain(make_screen(), planning, units)
