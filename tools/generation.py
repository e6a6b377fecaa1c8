"""Compare recorded generation (benchmarks/record_generation.py) with its estimate: docs/reports/generation.md."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import yaml

import memcalc
from benchmarks.record_generation import fields_of
from memcalc.estimation.estimate import estimate
from memcalc.ledger.result import Result
from memcalc.simulation.simulated_run import simulate
from memcalc.spec.spec import Spec
from memcalc.verdict.run_types import kinds_of
from tools.markdown import table

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
RECORDINGS = BENCHMARKS / "recordings" / "generation"


@dataclass(frozen=True)
class Run:
    """One recorded run."""

    case: str
    held_out: bool
    recorded: dict[str, Any]

    @cached_property
    def spec(self) -> Spec:
        """The run on the GPU of its record."""
        preset, fields = fields_of(self.case)
        if self.case.startswith("phi-") and "reserved_bytes" not in self.recorded:  # ran before its gelu was read
            fields.append("gelu=exact")
        return memcalc.load(preset, *fields, gpu=self.recorded["device"].partition(":")[2])

    @cached_property
    def result(self) -> Result:
        """The estimate from formulas."""
        return estimate(self.spec)

    @property
    def measured(self) -> int:
        """The highest allocated bytes of the recorded run."""
        phases: dict[str, int] = self.recorded["phases"]
        return max(phases.values())

    @property
    def error(self) -> float:
        """Of the estimated peak, against it."""
        return self.result.ledger.peak_bytes / self.measured - 1

    @property
    def cache_bytes(self) -> int:
        """The estimated cache of all sequences."""
        assert self.result.generation is not None
        assert self.result.spec.inference is not None
        return self.result.generation.bytes_per_sequence * self.result.spec.inference.batch_size


@lru_cache(maxsize=1)
def runs() -> tuple[Run, ...]:
    """All of them, in the order of the list of cases."""
    roles = yaml.safe_load((BENCHMARKS / "generation_cases.yaml").read_text())
    order = {case: role != "written-against" for role, cases in roles.items() for case in cases}
    lines = [line for path in sorted(RECORDINGS.glob("*.jsonl")) for line in path.read_text().splitlines()]
    found = {record["case"]: record for record in map(json.loads, lines)}
    return tuple(Run(case, held_out, found[case]) for case, held_out in order.items() if case in found)


def generation_table() -> str:
    """One line for each run, the worst first."""
    return table(
        ["run", "held out", "measured bytes", "estimated bytes", "error", "cache"],
        [
            [
                f"`{run.case}`",
                "yes" if run.held_out else "",
                f"{run.measured:,}",
                f"{run.result.ledger.peak_bytes:,}",
                f"{run.error:+.3%}",
                "exact" if run.cache_bytes == run.recorded["cache_bytes"] else "differs",
            ]
            for run in sorted(runs(), key=lambda run: -abs(run.error))
        ],
    )


def generation_summary() -> str:
    """Median and maximum error."""
    rows = []
    for held_out in (False, True):
        errors = [abs(run.error) for run in runs() if run.held_out is held_out]
        exact = sum(run.cache_bytes == run.recorded["cache_bytes"] for run in runs() if run.held_out is held_out)
        role = "**held out**" if held_out else "written against"
        rows.append([role, len(errors), f"{median(errors):.3%}", f"{max(errors):.2%}", f"{exact} of {len(errors)}"])
    return table(["the formulas were", "runs", "median error", "maximum error", "byte-exact caches"], rows)


def generation_reserved() -> str:
    """Errors of replayed reserved memory."""
    found: dict[str, list[float]] = {}
    for run in runs():
        if "reserved_bytes" in run.recorded:
            replayed = simulate(run.spec).reserved_bytes
            found.setdefault(kinds_of(run.spec)[0], []).append(replayed / run.recorded["reserved_bytes"] - 1)
    rows = []
    for kind, errors in sorted(found.items(), reverse=True):
        sizes = [abs(error) for error in errors]
        rows.append([kind, len(errors), f"{median(sizes):.3%}", f"{min(errors):+.2%}", f"{max(errors):+.2%}"])
    return table(["run type", "runs", "median error", "lowest error", "highest error"], rows)


TABLES = {
    "generation-table": generation_table,
    "generation-summary": generation_summary,
    "generation-reserved": generation_reserved,
}
