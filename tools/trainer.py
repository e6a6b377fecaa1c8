"""Compare Hugging Face's Trainer on the null device with the estimate of its arguments: docs/reports/accuracy.md."""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import memcalc
from memcalc.simulation.simulated_run import unsupported_reason
from tools.dry_runs import cases
from tools.markdown import table


@dataclass(frozen=True)
class Compared:
    """One run: its case, and bytes measured, estimated and replayed; zeros where it cannot be replayed."""

    case: dict[str, Any]

    @cached_property
    def _figures(self) -> dict[str, tuple[int, int, int]]:
        """Made when first read: tests are collected by the records alone."""
        spec = spec_of(self.case)
        result = memcalc.estimate(spec)
        estimated = result.headline
        replayed = None if unsupported_reason(spec) else result.replayed.headline
        (measured,) = self.case["record"]["ranks"]
        return {
            "allocated": (
                measured["allocated_bytes"],
                estimated.ledger.peak_bytes,
                replayed.ledger.peak_bytes if replayed else 0,
            ),
            "reserved": (
                measured["reserved_bytes"],
                estimated.reserved_bytes or 0,
                (replayed.reserved_bytes or 0) if replayed else 0,
            ),
        }

    @property
    def allocated(self) -> tuple[int, int, int]:
        """Bytes allocated at the peak: measured, estimated, replayed."""
        return self._figures["allocated"]

    @property
    def reserved(self) -> tuple[int, int, int]:
        """Bytes reserved at most: measured, estimated, replayed."""
        return self._figures["reserved"]

    def error(self, kind: str, of: int) -> float | None:
        """Of the estimate (1) or the replay (2), as a fraction of the measurement."""
        figures = self._figures[kind]
        return figures[of] / figures[0] - 1 if figures[of] else None


# The program, and what its data decide: every sequence was as long as the limit.
PROGRAM = ("framework=trainer", "versions.transformers=v5.23", "padding_mask=none")


def spec_of(case: dict[str, Any]) -> memcalc.Spec:
    """What memcalc reads from the file of arguments that the run was given, with the model named.

    Trainer has no field for the length of sequences. TRL has, which is not what ran here: it recomputes by default.
    """
    own = {key: value for key, value in case["arguments"].items() if key != "max_length"}
    own.setdefault("gradient_checkpointing", False)
    own.setdefault("dtype", "float32")  # of a configuration; a checkpoint would bring its own
    own.setdefault("lora_dropout", 0.0)  # PEFT's default, with which the script makes adapters; TRL's is 0.05
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arguments.json"
        path.write_text(json.dumps(own))
        settings = (*PROGRAM, f"s={case['arguments']['max_length']}", *case.get("settings", ()))
        return memcalc.load(path, f"preset={case['preset']}", *settings, gpu=case["record"]["card"])


@lru_cache(maxsize=1)
def compared() -> tuple[Compared, ...]:
    """Every recorded run that ended."""
    return tuple(Compared(case) for case in cases("trainer") if case["record"]["good"])


def trainer_summary() -> str:
    """Errors of the estimate and of the allocator replay."""
    lines = []
    for kind, of, words in (
        ("allocated", 1, "estimate, allocated"),
        ("allocated", 2, "replayed, allocated"),
        ("reserved", 2, "replayed, reserved"),
    ):
        errors = [error for run in compared() if (error := run.error(kind, of)) is not None]
        middle, worst = statistics.median(map(abs, errors)), max(errors, key=abs)
        lines.append([words, len(errors), f"{middle:.3%}", f"{worst:+.3%}"])
    return table(["figure", "runs", "median error", "maximum error"], lines)


def trainer_table() -> str:
    """One line a run."""

    def words(error: float | None) -> str:
        return "-" if error is None else f"{error:+.3%}"

    head = ["run", "allocated bytes", "error, formulas", "error, replay", "reserved bytes", "error, replay"]
    rows = []
    for run in compared():
        named = " ".join(f"{key}={value}" for key, value in run.case["arguments"].items())
        model = " ".join((run.case["preset"], *run.case.get("settings", ())))
        rows.append(
            [
                f"`{model}: {named}`",
                f"{run.allocated[0]:,}",
                *(words(run.error("allocated", of)) for of in (1, 2)),
                f"{run.reserved[0]:,}",
                words(run.error("reserved", 2)),
            ]
        )
    return table(head, rows)


TABLES = {"trainer-summary": trainer_summary, "trainer": trainer_table}
