"""Estimates against recordings of layers that PyTorch's DTensor splits: benchmarks/recordings/split."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import memcalc
from memcalc.ledger.ledger import Ledger
from tools.markdown import table

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "recordings" / "split"


class SplitRun(NamedTuple):
    """One recorded rank: the peak of every phase in bytes, and the estimate's ledger."""

    case: str
    ranks: int
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
def split_runs() -> tuple[SplitRun, ...]:
    """Every recorded rank, in the order of files and lines."""
    found = []
    for path in sorted(FOLDER.glob("*.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            spec = memcalc.load(record["spec"] | {"hardware": {"gpu": record["device"].removeprefix("null:")}})
            ledger = memcalc.estimate(spec).ledger
            found.append(SplitRun(record["case"], spec.parallelism.ranks, record["phases"], ledger))
    return tuple(found)


def split_summary() -> str:
    """One sentence."""
    errors = [abs(run.error) for run in split_runs()]
    return f"{len(errors)} runs: the peak within {median(errors):.3%} in the median and {max(errors):.3%} at worst.\n"


def split_table() -> str:
    """A line for each run."""
    rows = [
        [f"`{run.case}`", str(run.ranks), f"{run.measured:,}", f"{run.ledger.peak_bytes:,}", f"{run.error:+.3%}"]
        for run in split_runs()
    ]
    return table(["run", "ranks", "measured bytes", "estimated bytes", "error"], rows)
