"""The current estimate compared with recorded traces: the table of docs/reports/accuracy.md."""

from __future__ import annotations

import json
import statistics
from typing import NamedTuple

import memcalc
from memcalc.errors import MemcalcError
from memcalc.estimation.estimate import estimate
from memcalc.ledger.component import Component
from tools.accuracy import RECORDINGS
from tools.markdown import table

MIB = 2**20

TRACES = RECORDINGS / "traces" / "fake-a100-80gb.jsonl"  # benchmarks/record_traces.py


class Agreement(NamedTuple):
    """One traced run and the estimate of it."""

    preset: str
    implementation: str
    activations: tuple[int, int]  # traced, estimated; kept for backward when the loss is known, in the second step
    peak: tuple[int, int]
    phase: str  # of the traced peak
    least: tuple[int, int]  # the least memory in which the traced run ends, the estimate's lower bound


def agreements() -> list[Agreement]:
    """Every recorded trace that the estimate knows, in the order in which they were recorded."""
    found = []
    for line in TRACES.read_text().splitlines() if TRACES.exists() else []:
        record = json.loads(line)
        preset, *overrides = record["case"].split()
        try:
            formulas = estimate(memcalc.load(preset, *overrides, gpu=record["device"].partition(":")[2]))
        except MemcalcError:
            continue  # traced, but without formulas: nothing to compare
        ledger = formulas.ledger
        implementation = overrides[-1].partition("=")[2]
        activations = ledger.components("loss_2").get(Component.ACTIVATIONS, 0)
        phases = record["phases"]
        peak = max(phases, key=phases.__getitem__)
        estimated = max(ledger.totals[phase] for phase in phases)
        pair = (record["activations"], activations)
        least = (record["least"], ledger.peak_bytes)
        found.append(Agreement(preset, implementation, pair, (phases[peak], estimated), peak, least))
    return found


def error(pair: tuple[int, int]) -> float:
    """By which share the second is over (+) or under (-) the first."""
    return pair[1] / pair[0] - 1


def agreement_summary() -> str:
    """One sentence of medians and extremes."""
    found = agreements()
    if not found:
        return "No traces are recorded yet.\n"
    words = []
    for name in ("activations", "peak"):
        errors = [abs(error(getattr(agreement, name))) for agreement in found]
        words.append(f"{name}: median error {statistics.median(errors):.3%}, maximum error {max(errors):.2%}")
    return f"{len(found)} runs: {'; '.join(words)}.\n"


def need_summary() -> str:
    """The smallest device on which the traced runs end, and whether the lower bound of verdicts is below it."""
    found = agreements()
    if not found:
        return "No traces are recorded yet.\n"
    ratios = [run.least[0] / run.peak[0] for run in found]
    above = sum(run.least[1] > run.least[0] for run in found)
    return (
        f"The {len(found)} [traced runs of presets](accuracy-traces.md#estimate-against-trace) need a device of "
        f"{min(ratios):.3f} to {max(ratios):.3f} times their allocated peak to complete, median "
        f"{statistics.median(ratios):.3f}. The lower bound of verdicts exceeds this need in {above} runs.\n"
    )


def agreement_table() -> str:
    """A line for each run."""
    rows = []
    for run in agreements():
        row = [run.preset, run.implementation]
        for pair in (run.activations, run.peak):
            row += [f"{pair[0] / MIB:,.1f}", f"{error(pair):+.3%}"]
        rows.append(row)
    return table(["preset", "modules", "activations, MiB", "error", "peak, MiB", "error"], rows)
