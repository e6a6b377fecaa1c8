"""Explanation of ledger rows: shape, formula with numbers, live phases, source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.ledger.result import Result
from memcalc.ledger.row import Row
from memcalc.report.labels import label, meaning
from memcalc.report.tables.formula_values import symbol_values, with_numbers
from memcalc.units import Unit, format_bytes

ALL = "all"
PARAMETERS = "parameters"  # not a component: the table of the model's parameters by module
RECIPE = "recipe"  # not a component: the table of the recipes
EXPLAINABLE = (ALL, PARAMETERS, RECIPE, *(component.value for component in Component))


class ExplainedRow(NamedTuple):
    """One ledger row as text."""

    description: str  # "layers.*.attention.softmax  bf16 [1, 96, 2048, 2048] × 96"
    size: str
    formula: str


class RowGroup(NamedTuple):
    """Rows with the same live phases and source, largest first."""

    phases: str
    citation: str
    entries: list[ExplainedRow]


class ComponentSection(NamedTuple):
    """One component: its heading and its groups, largest first."""

    heading: str
    groups: list[RowGroup]


def explainable(word: str) -> str:
    """Return the component's name as the ledger spells it.

    Raises:
        InputError: when it names nothing that can be explained.
    """
    name = word.lower().replace("-", "_").replace(" ", "_")
    if name not in EXPLAINABLE:
        raise InputError(f"--explain {word[:60]}: unknown component.", f"Choose {', '.join(EXPLAINABLE)}.")
    return name


def chapters(result: Result, word: str, unit: Unit, *, at_peak: bool = False) -> Iterator[ComponentSection]:
    """Yield the chapters of `word` (a component, or "all"); those without a row only by name.

    Args:
        result: the result to explain.
        word: a component, or "all".
        unit: of memory.
        at_peak: only the rows that are live at the peak.
    """
    values = symbol_values(result)
    ledger = result.ledger
    sizes = ledger.components_by_phase[ledger.peak_phase]
    for component in Component:
        if word not in (ALL, component.value):
            continue
        rows = [row for row in ledger.rows if row.component is component]
        if at_peak:
            rows = [row for row in rows if ledger.peak_phase in row.phases]
        if not rows and word == ALL:
            continue
        heading = f"{label(component)}: {meaning(component)}; {_size(sizes.get(component, 0), unit)} at the peak"
        yield ComponentSection(heading, _groups(rows, ledger.phases, values, unit))


def _groups(rows: list[Row], phases: tuple[str, ...], values: dict[str, int], unit: Unit) -> list[RowGroup]:
    alike: dict[tuple[tuple[str, ...], str], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.phases, row.citation), []).append(row)
    by_size = sorted(alike.items(), key=lambda item: -sum(row.bytes for row in item[1]))
    return [
        RowGroup(
            phase_runs(live, phases),
            citation,
            [_entry(row, values, unit) for row in sorted(members, key=lambda row: -row.bytes)],
        )
        for (live, citation), members in by_size
    ]


def _entry(row: Row, values: dict[str, int], unit: Unit) -> ExplainedRow:
    shape = ", ".join(str(size) for size in row.shape)
    many = f" × {row.count:,}" if row.count != 1 else ""
    each, rest = divmod(row.bytes, row.count) if row.count else (0, 0)
    numbers = None if rest else with_numbers(row.formula, values, each)
    formula = f"{row.formula} = {numbers}" if numbers else f"{row.formula}: {each:,}"
    return ExplainedRow(
        description=f"{row.module}.{row.tensor}  {row.dtype} [{shape}]{many}",
        size=_size(row.bytes, unit),
        formula=f"{formula} bytes{' each' if many else ''}",
    )


def row_formula(row: Row, values: dict[str, int]) -> str:
    """Return a row in one line: tensor and formula."""
    entry = _entry(row, values, "GiB")
    return f"{entry.description}: {entry.formula}"


def _size(size: int, unit: Unit) -> str:
    """Return a size in the unit, or in bytes if it would round to zero."""
    text = format_bytes(size, unit)
    return format_bytes(size, "bytes") if size and not text.strip("0., GMiBbytes") else text


def phase_runs(live: tuple[str, ...], phases: tuple[str, ...]) -> str:
    """Phases in a row as "first to last": "forward_1 to backward_1, forward_2 to backward_2"."""
    if len(live) == len(phases):
        return "always"
    runs: list[list[str]] = []
    previous = -2
    for index, phase in enumerate(phases):
        if phase not in live:
            continue
        if index == previous + 1:
            runs[-1].append(phase)
        else:
            runs.append([phase])
        previous = index
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs) or "never"
