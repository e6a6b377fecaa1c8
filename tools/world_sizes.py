"""FSDP2 traced at world sizes from 1 to 1,024, compared with estimates: two tables of docs/reports/accuracy.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import memcalc
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from tools.accuracy import RECORDINGS
from tools.markdown import table

RECORDS = RECORDINGS / "traces" / "world-sizes.jsonl"  # benchmarks/world_sizes.py
CARD = "h100-80gb"
STATES = (Component.WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER_STATE)
EXPLAINED = 64  # ranks of the run with its peak shown row by row


class Sized(NamedTuple):
    """One world size. Bytes on a rank: traced and estimated."""

    preset: str
    ranks: int
    states: tuple[int, int]
    whole: int  # states of all ranks, if nothing were filled up
    peak: tuple[int, int]
    at_peak: dict[str, tuple[int, int]]

    @property
    def filled(self) -> float:
        """Which share of the states of all ranks is padding: rows that are no multiple of the ranks, and blocks."""
        return self.states[0] * self.ranks / self.whole - 1


def sizes() -> Iterator[Sized]:
    """Every record, in the order of the file."""
    whole: dict[str, int] = {}
    for record in map(json.loads, RECORDS.read_text().splitlines()):
        preset, *overrides = record["case"].split()
        spec = memcalc.load(preset, *overrides, gpu=CARD)
        ledger = memcalc.estimate(spec).ledger
        ranks = spec.parallelism.ranks
        held = sum(record["held"].get(state.value, 0) for state in STATES)
        if ranks == 1:
            whole[preset] = held
        estimated = sum(ledger.components("optimizer_step_2").get(state, 0) for state in STATES)
        peak = max(record["phases"].values()), ledger.peak_bytes
        yield Sized(preset, ranks, (held, estimated), whole[preset], peak, _rows(record, ledger))


def _rows(record: dict[str, Any], ledger: Ledger) -> dict[str, tuple[int, int]]:
    estimated: Counter[str] = Counter()
    for component, held in ledger.components("backward_2").items():
        estimated[component.value] += held
    return {name: (held, estimated[name]) for name, held in record["at_peak"].items()}


def world_sizes_table() -> str:
    """A line for each world size."""
    return table(
        ["preset", "ranks", "states on a rank, traced", "estimated", "padding", "peak, traced", "estimated", "error"],
        [
            [
                size.preset,
                f"{size.ranks:,}",
                f"{size.states[0]:,}",
                "identical" if size.states[0] == size.states[1] else f"{size.states[1]:,}",
                f"{size.filled:.4%}",
                f"{size.peak[0]:,}",
                f"{size.peak[1]:,}",
                f"{size.peak[1] / size.peak[0] - 1:+.3%}",
            ]
            for size in sizes()
        ],
    )


def world_sizes_rows() -> str:
    """The peak of the steady backward pass, component by component."""
    return table(
        ["preset", "component at the peak of backward_2", "traced", "estimated"],
        [
            [size.preset, name.replace("_", " "), f"{held:,}", f"{estimated:,}"]
            for size in sizes()
            if size.ranks == EXPLAINED
            for name, (held, estimated) in size.at_peak.items()
            if held or estimated
        ],
    )


TABLES: dict[str, Callable[[], str]] = {"world-sizes": world_sizes_table, "world-sizes-rows": world_sizes_rows}
