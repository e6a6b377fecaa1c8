"""`memcalc check`: check every configuration of a repository, for CI."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from memcalc.cli.options import AcceptUnknown, Gpu, Html, Set, Units

PATHS_HELP = "Files, directories to search, and patterns; default: `paths` of memcalc.toml."
BUDGET_HELP = "Memory limit per GPU, e.g. 70GiB, CUDA context included."
MARGIN_HELP = "Memory to keep free below GPU and budget, e.g. 5% or 2GiB."
BASELINE_HELP = "JSON of an earlier check: report each peak's change."
GROWTH_HELP = "With --baseline: largest growth of a peak that passes, e.g. 1% or 0."
SKIP_HELP = "Skip named files that are not configs; exit 0 if none is left."
SETTINGS_HELP = "Settings file; default: the nearest memcalc.toml or [tool.memcalc]."
REPORT_HELP = "Also write a report in another format to a file. Repeatable."


def command(
    paths: Annotated[list[Path] | None, typer.Argument(metavar="PATHS", help=PATHS_HELP)] = None,
    *,
    overrides: Set = None,
    gpu: Gpu = None,
    budget: Annotated[str | None, typer.Option(metavar="SIZE", help=BUDGET_HELP)] = None,
    margin: Annotated[str | None, typer.Option(metavar="SHARE|SIZE", help=MARGIN_HELP)] = None,
    baseline: Annotated[Path | None, typer.Option(metavar="FILE", help=BASELINE_HELP)] = None,
    max_growth: Annotated[str | None, typer.Option(metavar="SHARE|SIZE", help=GROWTH_HELP)] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            metavar="N",
            min=1,
            help="Number of processes; default: one per core, if there are enough configs.",
        ),
    ] = None,
    settings: Annotated[Path | None, typer.Option(metavar="FILE", help=SETTINGS_HELP)] = None,
    skip_others: Annotated[bool, typer.Option("--skip-others", help=SKIP_HELP)] = False,
    accept_unknown: AcceptUnknown = False,
    form: Annotated[
        Literal["table", "json", "junit", "github", "sarif", "markdown"],
        typer.Option("--format", "-f", help="Format of the report; github: annotations for GitHub Actions."),
    ] = "table",
    html: Html = None,
    also: Annotated[list[str] | None, typer.Option("--report", metavar="FORMAT=FILE", help=REPORT_HELP)] = None,
    units: Units = "GiB",
) -> None:
    """Check that every config fits, for CI.

    Exit code 0: all fit; 1: one does not, or grew, or memcalc cannot say whether it fits; 2: one is invalid, or there
    is nothing to check, or no limit.

    A named file is always checked. In a directory, YAML files with a `model:` block, `preset:` or `hf_config:` and
    Hugging Face config.json files are checked, and other frameworks' files that name a model; the rest is skipped and
    counted.

    Example: memcalc check configs/ --gpu h100-80gb --format github
    """
    from memcalc import api
    from memcalc.cli.output import WrittenFiles
    from memcalc.cli.reports import parse_reports, print_invalid, write_reports
    from memcalc.report.progress import shown_progress

    reports = parse_reports(also or ())
    describe = None
    if html is not None:
        from memcalc.report.views.runs import check_sections

        describe = partial(check_sections, unit=units)
    with shown_progress() as progress:
        report = api.check(
            *(paths or ()),
            overrides=overrides or (),
            gpu=gpu,
            budget=budget,
            margin=margin,
            baseline=baseline,
            max_growth=max_growth,
            jobs=jobs,
            settings=settings,
            skip_others=skip_others,
            describe=describe,
            progress=progress,
        )
    report = replace(report, accepts_unknown=accept_unknown)
    files = WrittenFiles()
    with files.writing():
        write_reports(report, reports, units)
        if html is not None:
            from memcalc.report.html.html_report import write_report
            from memcalc.report.views.runs import checks_view

            write_report(html, checks_view(report, units))
    if form == "table":
        from memcalc.report.checks.table import draw_checks
        from memcalc.report.screen import make_screen

        draw_checks(make_screen(), report, units)
    else:
        from memcalc.cli.output import print_exactly, print_text
        from memcalc.report.checks.formats import rendered

        (print_text if form == "markdown" else print_exactly)(rendered(report, form, units))
    print_invalid(report, also_drawn=form == "table" and sys.stdout.isatty())
    files.complain()
    raise typer.Exit(report.exit_code)
