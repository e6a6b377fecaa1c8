"""The table of docs/reports/families.md, from what benchmarks/families.py recorded."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import memcalc
from memcalc.ledger.component import Component
from tools.markdown import table

RECORDINGS = Path(__file__).resolve().parents[1] / "benchmarks" / "recordings" / "families"
PUBLISHED = RECORDINGS.parent / "catalogue" / "families.jsonl"
GIB = 2**30


def records() -> list[dict[str, Any]]:
    """One record a family, of the newest recorded version of transformers."""
    newest = max(
        RECORDINGS.glob("*.jsonl"), key=lambda path: [int(part) for part in path.stem.split("-")[1].split(".")]
    )
    return [json.loads(line) for line in newest.read_text().splitlines()]


def summary() -> str:
    """How many, in a sentence."""
    known = records()
    built = [record for record in known if record["outcome"] != "not instantiated"]
    traced = [record for record in built if record["outcome"] == "traced"]
    seconds = statistics.median(record["seconds"] for record in traced)
    return (
        f"Of {len(known)} architectures {len(built)} can be built from their default configuration, and "
        f"**{len(traced)}** of these trace (median {seconds:.1f} s on two busy cores).\n"
    )


def traced_table() -> str:
    """One line for each family that traces."""
    return table(
        ["family", "parameters", "dtype", "peak, GiB", "phase", "allocations and releases", "unknown values read"],
        [
            [
                f"`{record['family']}`",
                f"{record['parameters']:,}",
                {"float32": "fp32"}.get(record.get("dtype", ""), "bf16"),
                f"{record['peak_bytes'] / GIB:.3f}",
                record["peak_phase"].rpartition("_")[0],
                f"{record['events']:,}",
                record["readbacks"],
            ]
            for record in records()
            if record["outcome"] == "traced"
        ],
    )


def other_table() -> str:
    """One line for each of the rest, with the reason."""
    return table(
        ["family", "outcome", "reason"],
        [
            [f"`{record['family']}`", record["outcome"], "`" + record["reason"].replace("|", "/")[:160] + "`"]
            for record in records()
            if record["outcome"] != "traced"
        ],
    )


def published_table() -> str:
    """Return a table, one row per family with formulas: trace and estimate of a published model, the largest last."""
    rows = []
    for line in PUBLISHED.read_text().splitlines():
        record = json.loads(line)
        ledger = memcalc.estimate(record["hub_id"], *record["settings"]).replayed.ledger
        kept = max(ledger.components(phase).get(Component.ACTIVATIONS, 0) for phase in record["activations"])
        peak, activations = record["peak_bytes"], max(record["activations"].values())
        rows.append(
            (
                peak,
                [
                    f"`{record['family']}`",
                    record["hub_id"],
                    f"{peak / GIB:,.2f}",
                    f"{ledger.peak_bytes / peak - 1:+.2%}",
                    f"{kept / activations - 1:+.2%}",
                ],
            )
        )
    header = ["family", "model", "traced peak, GiB", "error of the peak", "error of the activations"]
    return table(header, [row for _, row in sorted(rows)])


TABLES = {
    "families-published": published_table,
    "families-summary": summary,
    "families-traced": traced_table,
    "families-other": other_table,
}
