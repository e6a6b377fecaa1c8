"""`memcalc diff`: two runs compared."""

from __future__ import annotations

from typing import Annotated

import typer

from memcalc.cli.options import CONFIG_HELP, Gpu, Html, Set, TableJsonOrMarkdown, Units, complete_config
from memcalc.cli.shorthand import with_shorthands

_SIDE = "FIELD=VALUE"


@with_shorthands(("budget",))
def command(
    a: Annotated[str, typer.Argument(metavar="A", help=CONFIG_HELP, autocompletion=complete_config)],
    b: Annotated[str, typer.Argument(metavar="B", help="Second configuration.", autocompletion=complete_config)],
    *,
    overrides: Set = None,
    set_a: Annotated[list[str] | None, typer.Option("--set-a", metavar=_SIDE, help="Like --set, for A only.")] = None,
    set_b: Annotated[list[str] | None, typer.Option("--set-b", metavar=_SIDE, help="Like --set, for B only.")] = None,
    gpu: Gpu = None,
    html: Html = None,
    form: TableJsonOrMarkdown = "table",
    units: Units = "GiB",
) -> None:
    """Compare the memory of two runs, component by component.

    Compares each run at its own peak, then each phase.

    Example: memcalc diff llama-3-8b llama-3-8b --set-b zero_stage=3 --set-b data_parallel=8
    """
    from memcalc import api
    from memcalc.cli.output import WrittenFiles

    shared = overrides or []
    difference = api.diff(
        api.load(a, *shared, *(set_a or ()), gpu=gpu),
        api.load(b, *shared, *(set_b or ()), gpu=gpu),
    )
    files = WrittenFiles()
    if html is not None:
        from memcalc.report.html.html_report import write_report
        from memcalc.report.views.runs import difference_view
        from memcalc.report.views.timeline import memory_section

        with files.writing():
            timelines = [memory_section(result, units) for result in difference.results]
            write_report(html, difference_view(difference, units, timelines))
    if form == "json":
        from memcalc.cli.output import print_json
        from memcalc.documents.check import difference_document

        print_json(difference_document(difference))
    elif form == "markdown":
        from memcalc.cli.output import print_text
        from memcalc.report.screens.diff import difference_markdown

        print_text(difference_markdown(difference, units))
    else:
        from memcalc.report.screen import make_screen
        from memcalc.report.screens.diff import draw_difference

        draw_difference(make_screen(), difference, units)
    files.complain()
