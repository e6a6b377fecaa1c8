"""The schema of results, read once: to generate and to check it takes seconds, to hold a document against it none."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "memcalc" / "data"


def validate_result(document: object) -> None:
    """Raise `jsonschema.ValidationError` if the shipped schema of results does not allow a document.

    tests/report/test_schema.py compares the shipped schemas with the code, and checks them.
    """
    _validator().validate(document)


@cache
def _validator() -> Any:
    import jsonschema

    schema = json.loads((DATA / "result.schema.json").read_text())
    return jsonschema.validators.validator_for(schema)(schema)
