"""Every row of the ledger opened: what it is, how its bytes come about, when it is alive, who says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.ledger.result import Result
from memcalc.ledger.row import Row
from memcalc.report.symbols import symbol_values, with_numbers
from memcalc.report.words import label, meaning
from memcalc.units import Unit, format_bytes

ALL = "all"
PARAMETERS = "parameters"  # not a component: the table of the model's parameters by module
EXPLAINABLE = (ALL, PARAMETERS, *(component.value for component in Component))


class Entry(NamedTuple):
    """One row of the ledger in words."""

    what: str  # "layers.*.attention.softmax  bf16 [1, 96, 2048, 2048] × 96"
    size: str
    formula: str
    phases: str
    citation: str


class Chapter(NamedTuple):
    """One component: its heading and its rows, largest first."""

    heading: str
    entries: list[Entry]


def explainable(word: str) -> str:
    """The word in the ledger's spelling.

    Raises:
        InputError: when it names nothing that can be explained.
    """
    name = word.lower().replace("-", "_").replace(" ", "_")
    if name not in EXPLAINABLE:
        raise InputError(f"--explain {word[:60]}: there is no such component.", f"Choose {', '.join(EXPLAINABLE)}.")
    return name


def chapters(result: Result, word: str, unit: Unit) -> Iterator[Chapter]:
    """The chapters that `word` (a component, or "all") asks for; those without a row only if asked by name."""
    values = symbol_values(result.spec)
    ledger = result.ledger
    at_peak = ledger.components_by_phase[ledger.peak_phase]
    for component in Component:
        if word not in (ALL, component.value):
            continue
        rows = sorted((row for row in ledger.rows if row.component is component), key=lambda row: -row.bytes)
        if not rows and word == ALL:
            continue
        size = format_bytes(at_peak.get(component, 0), unit)
        yield Chapter(
            f"{label(component)}: {meaning(component)}; {size} at the peak",
            [_entry(row, values, ledger.phases, unit) for row in rows],
        )


def _entry(row: Row, values: dict[str, int], phases: tuple[str, ...], unit: Unit) -> Entry:
    shape = ", ".join(str(size) for size in row.shape)
    many = f" × {row.count:,}" if row.count != 1 else ""
    each, rest = divmod(row.bytes, row.count) if row.count else (0, 0)
    numbers = None if rest else with_numbers(row.formula, values, each)
    formula = f"{row.formula} = {numbers}" if numbers else f"{row.formula}: {each:,}"
    return Entry(
        what=f"{row.module}.{row.tensor}  {row.dtype} [{shape}]{many}",
        size=format_bytes(row.bytes, unit),
        formula=f"{formula} bytes{' each' if many else ''}",
        phases=phase_runs(row.phases, phases),
        citation=row.citation,
    )


def phase_runs(alive: tuple[str, ...], phases: tuple[str, ...]) -> str:
    """Phases in a row as "first to last": "forward_1 to backward_1, forward_2 to backward_2"."""
    if len(alive) == len(phases):
        return "always"
    runs: list[list[str]] = []
    previous = -2
    for index, phase in enumerate(phases):
        if phase not in alive:
            continue
        if index == previous + 1:
            runs[-1].append(phase)
        else:
            runs.append([phase])
        previous = index
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs) or "never"
