"""`memcalc models`: the presets."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def command(
    form: Annotated[Literal["table", "json", "markdown"], typer.Option("--format", "-f")] = "table",
) -> None:
    """List the presets and the model families.

    Layers l, hidden size d, heads h, vocabulary V, as in the formulas.
    """
    from memcalc.cli.output import print_text
    from memcalc.cli.render import print_listing
    from memcalc.report.listings import family_words, model_grid, model_rows

    rows = model_rows()
    print_listing(form, rows, model_grid(rows))
    if form != "json":
        print_text(family_words() if form == "table" else f"\n{family_words()}")
