"""Estimates against recordings of one rank of many: benchmarks/recordings/sharded, and split."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache

import memcalc
from memcalc.ledger.ledger import Ledger
from memcalc.spec.spec import Spec
from tools.accuracy import RECORDINGS, asked


@dataclass(frozen=True)
class ShardedRun:
    """One recorded rank: the peak of every phase, and the estimate's ledger."""

    case: str
    engine: str
    ranks: int
    held_out: bool  # chosen and committed before it was recorded (sharded_cases.yaml)
    phases: dict[str, int]
    file: str
    spec: Spec
    asked_for: dict[str, int]  # by phase, without what the allocator adds; empty where it was not recorded

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger of the estimate, made when first read: tests are collected by the records alone."""
        return memcalc.estimate(self.spec).ledger

    @property
    def measured(self) -> int:
        """The most that was allocated at any time."""
        return max(self.phases.values())

    @property
    def error(self) -> float:
        """How much the estimate is over (+) or under (-), as a share of what was measured."""
        return self.ledger.peak_bytes / self.measured - 1

    @property
    def requested(self) -> tuple[int, int] | None:
        """Requested bytes in the phase of the peak: measured, estimated."""
        highest = max(self.ledger.totals, key=lambda phase: self.phases.get(phase, 0))
        return (self.asked_for[highest], asked(self.ledger, highest)) if self.asked_for else None


def sharded_runs() -> tuple[ShardedRun, ...]:
    """Every recorded rank of data-parallel engines."""
    return recorded_ranks("sharded")


def drawn_ranks() -> tuple[ShardedRun, ...]:
    """Return the randomly sampled runs (benchmarks/sample_cases.py)."""
    return recorded_ranks("drawn", "sharded-*.jsonl")


@lru_cache(maxsize=8)
def recorded_ranks(folder: str, pattern: str = "*.jsonl") -> tuple[ShardedRun, ...]:
    """Every recorded rank of a directory of recordings, in the order of files and lines."""
    records = {
        (path.name, record["case"]): record  # of a case recorded twice, the last
        for path in sorted((RECORDINGS / folder).glob(pattern))
        for record in map(json.loads, path.read_text().splitlines())
    }
    found = []
    for (file, case), record in records.items():
        spec = memcalc.load(record["spec"] | {"hardware": {"gpu": record["device"].removeprefix("null:")}})
        spread = spec.parallelism
        run = (case, spread.engine, spread.ranks, "held-out" in file, record["phases"])
        found.append(ShardedRun(*run, file, spec, record.get("requested", {})))
    return tuple(found)
