"""Estimates against recordings: the figures of docs/accuracy.md."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import memcalc

RECORDINGS = Path(__file__).resolve().parents[1] / "benchmarks" / "recordings"


class Case(NamedTuple):
    """One recorded run, and what the estimate says about it. Bytes, allocated, at the peak."""

    file: str
    device: str  # in words
    card: str  # as the record names it: "null:a100-80gb"
    run: str
    measured: int
    estimated: int

    @property
    def error(self) -> float:
        """How much the estimate is over (+) or under (-), as a share of what was measured."""
        return self.estimated / self.measured - 1


def cases() -> list[Case]:
    """Every recorded run that ended well, in the order of files and lines; of a run recorded twice, the last."""
    records = {
        (path.name, record["command"]): record
        for path in sorted(RECORDINGS.glob("*.jsonl"))
        for record in map(json.loads, path.read_text().splitlines())
        if record["outcome"] == "done"
    }
    return [_case(file, record) for (file, _), record in records.items()]


def _case(file: str, record: dict[str, Any]) -> Case:
    spec = memcalc.Spec.model_validate_json(json.dumps(record["spec"]))
    device = record["device"]
    kind, _, card = device["identifier"].partition(":")
    return Case(
        file=file,
        device=f"{device['kind']}, {device['name']}, torch {record['versions']['torch']}",
        card=device["identifier"],
        run=record["command"].removeprefix("memcalc measure ").replace("--set ", ""),
        measured=max(phase["peak_allocated_bytes"] for phase in record["phases"]),
        estimated=memcalc.estimate(spec, gpu=card if kind == "null" else None).ledger.peak_bytes,
    )


class Summary(NamedTuple):
    """The errors of several cases; shares, not percent."""

    runs: int
    median: float
    worst: float


def summarized(several: list[Case]) -> Summary:
    """Median and worst of the absolute errors."""
    errors = [abs(case.error) for case in several]
    return Summary(len(errors), statistics.median(errors), max(errors))
