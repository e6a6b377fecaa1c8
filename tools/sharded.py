"""Estimates against recordings of one rank of many: benchmarks/recordings/sharded, and split."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple

import memcalc
from memcalc.ledger.ledger import Ledger
from tools.accuracy import RECORDINGS


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


def sharded_runs() -> tuple[ShardedRun, ...]:
    """Every recorded rank of data-parallel engines."""
    return recorded_ranks("sharded")


@lru_cache(maxsize=5)
def recorded_ranks(folder: str) -> tuple[ShardedRun, ...]:
    """Every recorded rank of a folder of recordings, in the order of files and lines."""
    found = []
    for path in sorted((RECORDINGS / folder).glob("*.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            spec = memcalc.load(record["spec"] | {"hardware": {"gpu": record["device"].removeprefix("null:")}})
            ledger, spread = memcalc.estimate(spec).ledger, spec.parallelism
            held_out = "held-out" in path.name
            run = (record["case"], spread.engine, spread.ranks, held_out, record["phases"], ledger)
            found.append(ShardedRun(*run))
    return tuple(found)
