"""Estimates against recordings of one rank of many: benchmarks/recordings/sharded."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import memcalc
from memcalc.ledger.ledger import Ledger

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "recordings" / "sharded"


class ShardedRun(NamedTuple):
    """One recorded rank: the peak of every phase, and the estimate's ledger."""

    case: str
    engine: str
    ranks: int
    held_out: bool  # chosen and committed before it was recorded (sharded_cases.yaml)
    phases: dict[str, int]
    ledger: Ledger

    @property
    def measured(self) -> int:
        """The most that was allocated at any time."""
        return max(self.phases.values())

    @property
    def error(self) -> float:
        """How much the estimate is over (+) or under (-), as a share of what was measured."""
        return self.ledger.peak_bytes / self.measured - 1


@lru_cache(maxsize=1)
def sharded_runs() -> tuple[ShardedRun, ...]:
    """Every recorded rank, in the order of files and lines."""
    found = []
    for path in sorted(FOLDER.glob("*.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            spec = record["spec"] | {"hardware": {"gpu": record["device"].removeprefix("null:")}}
            ledger = memcalc.estimate(spec).ledger
            spread = spec["parallelism"]
            held_out = "held-out" in path.name
            run = (record["case"], spread["engine"], spread["data_parallel"], held_out, record["phases"], ledger)
            found.append(ShardedRun(*run))
    return tuple(found)
