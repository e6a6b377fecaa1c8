"""Predictions of today against every record that `measure` made: the table of docs/accuracy.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memcalc.measuring.records import read
from memcalc.proving.summary import Errors, summary
from tools.markdown import table

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "recordings" / "measured"
TOTALS = ("allocated", "reserved", "device")


def groups() -> dict[str, list[dict[str, Any]]]:
    """The records of each device and PyTorch."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(FOLDER.glob("*.jsonl")):
        for record in read(path):
            device = record["device"]
            name = f"{device['kind']}, {device['name']}, torch {record['versions']['torch']}"
            found.setdefault(name, []).append(record)
    return found


def measured_table() -> str:
    """A line for each total and component of each group."""
    rows = [
        [name, each.name, str(len(each.shares)), *figures(each)]
        for name, records in groups().items()
        for each in summary(records)
    ]
    return table(["device", "figure", "runs", "median", "p95", "worst", "under"], rows)


def figures(errors: Errors) -> list[str]:
    """Median, 95th percentile, worst, and the share of runs that held more than was said."""
    shares = (errors.median, errors.p95, errors.worst)
    return [*(f"{share:+.3%}" for share in shares), f"{errors.under:.0%}"]
