"""Estimates against recordings: the figures of docs/reports/accuracy.md."""

from __future__ import annotations

import json
import statistics
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import memcalc
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.spec.spec import Spec

RECORDINGS = Path(__file__).resolve().parents[1] / "benchmarks" / "recordings"


class Case(NamedTuple):
    """One recorded run and its estimate: allocated bytes at the peak."""

    file: str
    device: str  # in words
    card: str  # as the record names it: "null:a100-80gb"
    run: str
    measured: int
    estimated: int
    phases: dict[str, tuple[int, int]]  # of the first two steps: measured, estimated
    reserved: tuple[int, int]  # by the allocator, at its highest: measured, estimated
    requested: tuple[int, int]  # requested bytes at the peak, without the allocator's rounding: both
    spec: Spec

    @property
    def held_out(self) -> bool:
        """Whether the run was chosen before the formulas had seen anything like it (reference_cases.yaml)."""
        return "held-out" in self.file

    @property
    def error(self) -> float:
        """How much the estimate is over (+) or under (-), as a share of what was measured."""
        return self.estimated / self.measured - 1


def cases() -> tuple[Case, ...]:
    """Every recorded run that somebody chose and that ended well."""
    return _cases("*.jsonl")


def drawn_cases() -> tuple[Case, ...]:
    """Return the randomly sampled runs (benchmarks/sample_cases.py)."""
    return _cases("drawn/single-*.jsonl")


@lru_cache(maxsize=2)
def _cases(pattern: str) -> tuple[Case, ...]:
    """In the order of files and lines; of a run recorded twice, the last."""
    records = {
        (path.name, record["command"]): record
        for path in sorted(RECORDINGS.glob(pattern))
        for record in map(json.loads, path.read_text().splitlines())
        if record["outcome"] == "done"
    }
    return tuple(_case(file, record) for (file, _), record in records.items())


def run_of(record: dict[str, Any]) -> str:
    """A run in words: its command without what all have."""
    command: str = record["command"]
    return command.removeprefix("memcalc measure ").replace("--set ", "")


def as_run(spec: dict[str, Any]) -> dict[str, Any]:
    """A recorded spec with what its step did before there was a field for it; of renamed fields the loader knows.

    The step took transformers' windows out of the model, as for a kernel that knows them.
    """
    return spec | {"training": {"attention_windows": "kernel", **spec["training"]}}


def _case(file: str, record: dict[str, Any]) -> Case:
    spec = memcalc.load(as_run(record["spec"]))
    device = record["device"]
    kind, _, card = device["identifier"].partition(":")
    headline = memcalc.estimate(spec, gpu=card if kind == "null" else None).headline
    ledger = headline.ledger
    peaks = {phase["name"]: phase["peak_allocated_bytes"] for phase in record["phases"]}
    return Case(
        file=file,
        device=f"{device['kind']}, {device['name']}, torch {record['versions']['torch']}",
        card=device["identifier"],
        run=run_of(record),
        measured=max(peaks.values()),
        estimated=ledger.peak_bytes,
        phases={phase: (peaks[phase], total) for phase, total in ledger.totals.items() if phase in peaks},
        reserved=(max(phase["peak_reserved_bytes"] for phase in record["phases"]), headline.reserved_bytes or 0),
        requested=_requested(ledger, record),
        spec=spec,
    )


def _requested(ledger: Ledger, record: dict[str, Any]) -> tuple[int, int]:
    """Requested bytes in the phase that allocates most, measured and estimated."""
    highest = max(
        (phase for phase in record["phases"] if phase["name"] in ledger.totals),
        key=lambda phase: phase["peak_allocated_bytes"],
    )
    return highest["peak_requested_bytes"], asked(ledger, highest["name"])


def asked(ledger: Ledger, phase: str) -> int:
    """Bytes that the program asks for in a phase, without what the allocator adds to them."""
    return ledger.totals[phase] - ledger.components(phase).get(Component.BLOCK_ROUNDING, 0)


class Summary(NamedTuple):
    """The errors of several cases; shares, not percent."""

    runs: int
    median: float
    worst: float


def summarized(several: list[Case]) -> Summary:
    """Median and worst of the absolute errors."""
    errors = [abs(case.error) for case in several]
    return Summary(len(errors), statistics.median(errors), max(errors))
