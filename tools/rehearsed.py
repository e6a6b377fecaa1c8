"""Rehearsed estimates against recordings: the figures of docs/rehearsal.md."""

from __future__ import annotations

import json
import statistics
from functools import lru_cache
from typing import NamedTuple

import memcalc
from memcalc.rehearsal.rehearsal import why_not
from tools.accuracy import RECORDINGS, run_of
from tools.markdown import table

SHOWN = 0.002  # the share from which on a difference in reserved memory has a row of its own


class Rehearsed(NamedTuple):
    """One recorded run: bytes measured, by formula and rehearsed, at their highest."""

    run: str
    card: str
    allocated: tuple[int, int, int]
    reserved: tuple[int, int, int]

    def errors(self, of: int) -> tuple[float, float]:
        """Of formulas (1) or rehearsal (2): in allocated and in reserved memory, as shares of what was measured."""
        return self.allocated[of] / self.allocated[0] - 1, self.reserved[of] / self.reserved[0] - 1


@lru_cache(maxsize=1)
def rehearsed_runs(every: int = 1) -> tuple[Rehearsed, ...]:
    """The recorded runs that can be rehearsed; `every`: one of so many."""
    found: list[Rehearsed] = []
    number = 0
    for path in sorted(RECORDINGS.glob("*.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            card = record["device"]["identifier"].partition(":")[2]
            if record["outcome"] != "done" or why_not(spec := memcalc.load(record["spec"], gpu=card)):
                continue
            number += 1
            if number % every:
                continue
            formula, rehearsed = (memcalc.estimate(spec, rehearse=played).headline for played in (False, True))
            allocated, reserved = (
                max(phase[f"peak_{kind}_bytes"] for phase in record["phases"]) for kind in ("allocated", "reserved")
            )
            found.append(
                Rehearsed(
                    run_of(record),
                    card,
                    (allocated, formula.ledger.peak_bytes, rehearsed.ledger.peak_bytes),
                    (reserved, formula.reserved_bytes or 0, rehearsed.reserved_bytes or 0),
                )
            )
    return tuple(found)


def rehearsed_summary() -> str:
    """Errors by formula and rehearsed."""
    runs, rows = rehearsed_runs(), []
    for index, kind in enumerate(("allocated", "reserved")):
        for of, how in ((1, "by formula"), (2, "rehearsed")):
            errors = sorted(abs(run.errors(of)[index]) for run in runs)
            same = sum(error == 0 for error in errors)
            figures = (statistics.median(errors), errors[int(0.95 * len(errors))], errors[-1])
            rows.append([kind, how, len(runs), same, *(f"{figure:.3%}" for figure in figures)])
    return table(["peak", "how", "runs", "same to the byte", "median error", "p95", "worst"], rows)


def rehearsed_misses() -> str:
    """The runs whose reserved memory is missed by more than next to nothing, the worst first."""
    missed = sorted(
        (run for run in rehearsed_runs() if abs(run.errors(2)[1]) > SHOWN), key=lambda run: -abs(run.errors(2)[1])
    )
    rows = [
        [f"`{run.run}`", run.card, f"{run.reserved[0]:,}", f"{run.reserved[2]:,}", f"{run.errors(2)[1]:+.3%}"]
        for run in missed
    ]
    return table(["run", "on", "reserved bytes", "rehearsed", "error"], rows)


TABLES = {"rehearsed-summary": rehearsed_summary, "rehearsed-misses": rehearsed_misses}
