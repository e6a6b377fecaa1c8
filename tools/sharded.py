"""Estimates against recordings of one rank of many: benchmarks/recordings/sharded, and split."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple

import memcalc
from memcalc.ledger.ledger import Ledger
from memcalc.spec.spec import Spec
from tools.accuracy import RECORDINGS, asked


class ShardedRun(NamedTuple):
    """One recorded rank: the peak of every phase, and the estimate's ledger."""

    case: str
    engine: str
    ranks: int
    held_out: bool  # chosen and committed before it was recorded (sharded_cases.yaml)
    phases: dict[str, int]
    ledger: Ledger
    file: str
    spec: Spec
    asked_for: dict[str, int]  # by phase, without what the allocator adds; empty where it was not recorded

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
        ledger, spread = memcalc.estimate(spec).ledger, spec.parallelism
        run = (case, spread.engine, spread.ranks, "held-out" in file, record["phases"], ledger)
        found.append(ShardedRun(*run, file, spec, record.get("requested", {})))
    return tuple(found)
