"""`memcalc recompute`: plan activation recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from memcalc.cli.options import AcceptUnknown, Config, Gpu, Html, Set, Units
from memcalc.errors import InputError
from memcalc.files import write_text
from memcalc.units import Unit


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
    maximize: Annotated[
        Literal["micro_batch_size"] | None, typer.Option(help="Find the largest value for which a plan fits.")
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
    python: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="For null: a Python interpreter with a CUDA build of torch."),
    ] = None,
    host_bandwidth: Annotated[
        float,
        typer.Option(
            metavar="GB/S", min=0.001, help="Bandwidth of the link to the host, for the comparison with offload."
        ),
    ] = 25.0,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw memory against compute: .png or .svg (extra plot)."),
    ] = None,
    html: Html = None,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the configuration with the plan.")] = None,
    accept_unknown: AcceptUnknown = False,
    form: Annotated[Literal["table", "json"], typer.Option("--format", "-f")] = "table",
    units: Units = "GiB",
) -> None:
    """Plan which activations to save and which to recompute.

    The cheapest plan with which the run fits its GPU or the budget, by allocator replay: its cost, its peak, the lines
    to paste into the training code, and the plan for the configuration.

    Exit code 1: no plan fits, or memcalc cannot say (unless --accept-unknown).

    Example: memcalc recompute llama-3-8b --gpu h100-80gb --set recipe=pure --set b=2
    """
    from memcalc import api
    from memcalc.cli.output import WrittenFiles
    from memcalc.report.progress import shown_progress

    if api.describes_chain(config):
        if overrides or maximize or verify or plot or html or write:
            raise InputError(
                f"{config} describes a chain, which has no fields to set and nothing to trace, draw or write.",
                "Leave out --set, --maximize, --verify, --plot, --html and --write.",
                "recompute",
            )
        _plan_chain(config, budget, gpu, strategy, form, units)
        return
    if plot is not None:
        from memcalc.report.plots.files import PICTURES, check_target

        check_target(plot, PICTURES)
    if html is not None:
        from memcalc.report.html_report import check_report

        check_report(html)
    with shown_progress() as progress:
        planning = api.recompute(
            config,
            *(overrides or ()),
            gpu=gpu,
            budget=budget,
            strategy=strategy,
            maximize=maximize is not None,
            host_gb_per_second=host_bandwidth,
            progress=progress,
        )
        checked = api.verified(planning, tuple(device or ("fake", "null")), python, progress) if verify else []
    files = WrittenFiles()
    with files.writing():
        if write is not None:
            from memcalc.planning.planning import planned_yaml

            write_text(write, planned_yaml(planning))
        if plot is not None:
            from memcalc.report.pareto_plot import save_front

            save_front(plot, planning, units)
        if html is not None:
            from memcalc.report.html_report import write_report
            from memcalc.report.views.runs import recompute_view
            from memcalc.report.views.timeline import memory_section

            sections = [memory_section(planning.result, units)]
            write_report(html, recompute_view(planning, units, checked, sections))
    if form == "json":
        from memcalc.cli.output import print_json
        from memcalc.report.recompute import planning_document

        print_json(planning_document(planning, checked))
    else:
        from memcalc.report.recompute import draw_planning
        from memcalc.report.screen import make_screen

        draw_planning(make_screen(), planning, units, checked)
    files.complain()
    if planning.verdict.answer == "unknown" and not accept_unknown:
        raise typer.Exit(1)


def _plan_chain(config: str, budget: str | None, gpu: str | None, strategy: str, form: str, units: Unit) -> None:
    from memcalc import api

    planning = api.recompute_chain(config, gpu=gpu, budget=budget, strategy=strategy)
    if form == "json":
        from memcalc.cli.output import print_json
        from memcalc.report.chain import chain_document

        print_json(chain_document(planning))
    else:
        from memcalc.report.chain import draw_chain
        from memcalc.report.screen import make_screen

        draw_chain(make_screen(), planning, units)
