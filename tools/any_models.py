"""Models without formulas: traces compared with the null device, for docs/reports/accuracy-traces.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

from tools.accuracy import RECORDINGS
from tools.markdown import table

RECORD = RECORDINGS / "any-models" / "null-h100-80gb-torch-2.13.0.jsonl"  # benchmarks/any_models.py


def records() -> list[dict[str, Any]]:
    """Every recorded run, in the order of benchmarks/any_models.yaml."""
    return [json.loads(line) for line in RECORD.read_text().splitlines()]


def errors(figure: str) -> list[float]:
    """By which fraction each trace is over (+) or under (-) the null device, of "allocated" or "reserved" memory."""
    key = f"{figure}_bytes"
    return [record["trace"][key] / record["null"][key] - 1 for record in records()]


def summary() -> str:
    """Medians and maxima over all runs."""
    parts = []
    for figure in ("allocated", "reserved"):
        sizes = [abs(error) for error in errors(figure)]
        parts.append(f"{figure} memory: median error {statistics.median(sizes):.3%}, maximum error {max(sizes):.2%}")
    same = sum(record["trace"]["allocated_bytes"] == record["null"]["allocated_bytes"] for record in records())
    return f"{len(records())} runs: {'; '.join(parts)}. {same} have a byte-exact peak.\n"


def runs_table() -> str:
    """One row for each run. Bytes."""
    rows = []
    for record, allocated, reserved in zip(records(), errors("allocated"), errors("reserved"), strict=True):
        null = record["null"]
        rows.append(
            (
                record["case"],
                f"{record['trace']['parameters'] / 1e6:,.0f} M",
                f"{null['allocated_bytes']:,}",
                f"{allocated:+.3%}",
                f"{null['reserved_bytes']:,}",
                f"{reserved:+.2%}",
            )
        )
    heads = ("run", "parameters", "allocated, null device", "trace error", "reserved, null device", "trace error")
    return table(heads, rows)


TABLES: dict[str, Callable[[], str]] = {"any-models-summary": summary, "any-models": runs_table}
