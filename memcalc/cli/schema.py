"""`memcalc schema`: JSON Schemas of what memcalc reads and writes."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def command(
    document: Annotated[
        Literal["config", "result"],
        typer.Argument(help="config: the fields of a YAML file; result: the output of --format json."),
    ] = "config",
) -> None:
    """Print the JSON Schema of configs or of results."""
    from memcalc.cli.output import print_json
    from memcalc.documents.schema import config_schema, result_schema

    print_json(config_schema() if document == "config" else result_schema())
