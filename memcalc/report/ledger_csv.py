"""The ledger as CSV: one line per row, bytes as integers."""

from __future__ import annotations

import csv
import io

from memcalc.ledger.result import Sizing
from memcalc.ledger.row import Row


def ledger_csv(result: Sizing) -> str:
    """All rows of the headline rank, without a final line break. Shapes and phases are separated by blanks."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    for row in result.ledger.rows:
        flat = {"shape": " ".join(str(size) for size in row.shape), "phases": " ".join(row.phases)}
        writer.writerow({**row._asdict(), **flat}.values())
    return text.getvalue().rstrip("\n")
