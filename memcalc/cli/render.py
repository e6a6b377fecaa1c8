"""Selects the writer of a --format, and loads no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.cli.output import print_json, print_text
from memcalc.ledger.result import Result
from memcalc.report.screen import Details, TextTable, markdown_grid
from memcalc.units import Unit

if TYPE_CHECKING:
    from memcalc.measuring import Measurement


def print_sizing(
    result: Result, form: str, unit: Unit, details: Details, *, short: bool, measurement: Measurement | None
) -> None:
    """Print an estimate, and a measurement if there is one.

    Args:
        result: the estimate.
        form: of --format.
        unit: of memory.
        details: what is shown beyond the figures.
        short: on a terminal, in at most 30 lines for one GPU and 40 for any layout.
        measurement: of the same run.
    """
    if form == "json":
        from memcalc.documents.result import document_with_sources

        others = {} if measurement is None else {"measured": measurement.result}
        print_json(document_with_sources(result, **others))
    elif form == "markdown":
        from memcalc.report.markdown import sizing_markdown

        print_text(sizing_markdown(result, unit, details))
        if measurement is not None:
            from memcalc.report.tables.comparison import comparison_grids

            for grid in comparison_grids((result, measurement.result), unit):
                print_text("\n" + "\n".join(markdown_grid(grid)).rstrip())
    elif form == "csv":
        from memcalc.report.csv_text import ledger_csv

        print_text(ledger_csv(result))
    else:
        from memcalc.report.screen import make_screen
        from memcalc.report.screens.sizing import draw_short, draw_sizing

        screen = make_screen()
        draw = draw_short if short else draw_sizing
        draw(screen, result, unit, details)
        if measurement is not None:
            from memcalc.report.tables.comparison import draw_comparison

            draw_comparison(screen, (result, measurement.result), unit)


def print_listing(form: str, rows: list[dict[str, Any]], grid: TextTable) -> None:
    """Print a list of rows: as they are in JSON, else as a table."""
    if form == "json":
        print_json(rows)
    elif form == "markdown":
        print_text("\n".join(markdown_grid(grid)).rstrip())
    else:
        from memcalc.report.screen import draw_grid, make_screen

        draw_grid(make_screen(), grid)
