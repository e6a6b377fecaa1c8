"""Tables for other programs as CSV: bytes as integers, and no final line break."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from memcalc.ledger.result import Sizing
from memcalc.ledger.row import Row


def csv_text(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return the head and the rows, a line each."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue().rstrip("\n")


def ledger_csv(result: Sizing) -> str:
    """All rows of the headline rank. Shapes and phases are separated by blanks."""
    rows = (
        row._asdict() | {"shape": " ".join(map(str, row.shape)), "phases": " ".join(row.phases)}
        for row in result.ledger.rows
    )
    return csv_text(Row._fields, (row.values() for row in rows))
