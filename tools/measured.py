"""Predictions of today against every record that `measure` made: the table of docs/accuracy.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memcalc.measuring.records import read
from memcalc.proving.summary import Errors, summary
from tools.markdown import table

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "recordings" / "measured"
PROBES = FOLDER.with_name("probes")


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


def probe_table() -> str:
    """What operators were seen to take inside, where it is anything; the rule beside it."""
    rows = [
        [
            line["operator"],
            line["shape"],
            line["direction"],
            f"{line['hidden']:,}",
            "" if line["rule"] == line["hidden"] else f"{line['rule']:,}",
        ]
        for line in probes()
        if line["hidden"] or line["rule"]
    ]
    return table(["operator", "shape", "direction", "bytes inside", "rule, where it differs"], rows)


def probes() -> list[dict[str, Any]]:
    """The recorded lines of benchmarks/probe.py; of an operator that was probed again, the last."""
    found = {
        (path.name, line["operator"], line["shape"], line["direction"]): line
        for path in sorted(PROBES.glob("*.jsonl"))
        for line in read(path)
    }
    return list(found.values())
