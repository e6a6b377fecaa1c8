"""`memcalc models`: the presets, and the published models of the catalogue."""

from __future__ import annotations

from typing import Annotated

import typer

from memcalc.cli.options import TableJsonOrMarkdown


def command(
    query: Annotated[
        list[str] | None,
        typer.Argument(metavar="[QUERY]", help="Search the published models: words of a hub id, such as `qwen3 14b`."),
    ] = None,
    *,
    form: TableJsonOrMarkdown = "table",
    every: Annotated[bool, typer.Option("--all", help="Show all matches instead of the first 20.")] = False,
) -> None:
    """List presets and model families, or search published models.

    Layers l, hidden size d, heads h, vocabulary V, as in the formulas. Estimate any hub id that is found by its name.

    Example: memcalc models llama 3.1 8b
    """
    from memcalc.cli.output import print_text
    from memcalc.cli.render import print_listing

    if query:
        from memcalc.catalogue.shipped import search_shipped
        from memcalc.report.screens.listings import MOST_ROWS, published_grid, published_rows, search_summary

        found = search_shipped(" ".join(query))
        rows = published_rows(found if every or form == "json" else found[:MOST_ROWS])
        print_listing(form, rows, published_grid(rows))
        if form != "json":
            words = search_summary(" ".join(query), len(found), len(rows))
            print_text(words if form == "table" else f"\n{words}")
        return
    from memcalc.report.screens.listings import family_list, model_grid, model_rows

    rows = model_rows()
    print_listing(form, rows, model_grid(rows))
    if form != "json":
        print_text(family_list() if form == "table" else f"\n{family_list()}")
