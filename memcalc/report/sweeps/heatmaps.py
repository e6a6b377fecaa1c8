"""Heatmaps of a grid: two axes per map, one map per combination of the other fields; and their words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.report.labels import listed, plural
from memcalc.sweeping.grid import Axis, written
from memcalc.sweeping.pareto_front import GrowthAxes
from memcalc.sweeping.replays import MOST_OF_FRONT
from memcalc.sweeping.table import Table
from memcalc.sweeping.verdict_terms import ANSWERS, DOES_NOT_FIT, FITS, UNJUDGED, VerdictTerms


class Boundary(NamedTuple):
    """The fit boundary of a row of a map, by columns."""

    fits: int | None  # the last one that fits before the first that does not; None: there is none
    close: int | None  # the last one behind it that is close, before the first that does not fit; None: there is none


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One map. Arrays are [rows, columns]."""

    other_axes: str  # the values of the axes that span other maps: "recompute = full"
    rows: list[str]  # what each row is; one without a name where a single axis varies
    columns: list[str]  # what each column is
    numbers: npt.NDArray[np.int64]  # of the configurations in the table
    # device memory over usable memory of the GPU, or over the largest of all where no GPU is given
    fraction: npt.NDArray[np.float64]
    verdict: npt.NDArray[np.int8]  # numbers of `Table.answers`; what is valid fits where no GPU is given
    valid: npt.NDArray[np.bool_]  # whether the rules of each hold

    def boundaries(self) -> list[Boundary]:
        """Return the fit boundary of each row."""
        found: list[Boundary] = []
        for valid, verdict in zip(self.valid, self.verdict, strict=True):
            fits: int | None = None
            close: int | None = None
            for column in np.flatnonzero(valid).tolist():
                if verdict[column] == DOES_NOT_FIT:
                    break
                if verdict[column] == FITS:
                    fits, close = column, None
                else:
                    close = column
            found.append(Boundary(fits, close))
        return found


class HeatMaps:
    """The maps of a table that holds a whole grid."""

    def __init__(self, table: Table) -> None:
        self.table = table
        axes = table.grid.axes
        self.has_verdicts = bool((table.usable_bytes[table.valid] >= 0).all())
        # The longest list of numbers runs to the right, the longest other list down.
        order = sorted(range(len(axes)), key=lambda number: (not _numeric(axes[number]), -len(axes[number].values)))
        self.across = order[0]
        self.down = order[1] if len(axes) > 1 else None

    @property
    def across_name(self) -> str:
        """The field along the columns."""
        return self.table.grid.axes[self.across].name

    @property
    def down_name(self) -> str:
        """The field along the rows, or nothing."""
        return "" if self.down is None else self.table.grid.axes[self.down].name

    def maps(self) -> Iterator[HeatMap]:
        """Every map, in the order of the grid."""
        table, axes = self.table, self.table.grid.axes
        shape = table.grid.shape
        numbers = np.arange(table.grid.size).reshape(shape)
        spanned = [self.across] if self.down is None else [self.down, self.across]
        others = [number for number in range(len(axes)) if number not in spanned]
        whole = np.where(table.usable_bytes > 0, table.usable_bytes, max(int(table.device_bytes.max()), 1))
        possible = table.possible
        share = np.where(table.valid, table.device_bytes / whole, 0.0)
        verdict = table.verdict
        if not self.has_verdicts:
            verdict = np.where(table.valid, FITS, np.where(table.too_large, DOES_NOT_FIT, UNJUDGED)).astype(np.int8)
        for steps in product(*(range(shape[number]) for number in others)):
            place: list[Any] = [slice(None)] * len(axes)
            for number, step in zip(others, steps, strict=True):
                place[number] = step
            own = numbers[tuple(place)]
            if self.down is None:
                own = own[None]
            elif self.down > self.across:
                own = own.T
            yield HeatMap(
                ", ".join(f"{axes[n].name} = {_step(axes[n], step)}" for n, step in zip(others, steps, strict=True)),
                [""] if self.down is None else _steps(axes[self.down]),
                _steps(axes[self.across]),
                own,
                share[own],
                verdict[own],
                possible[own],
            )


def _numeric(axis: Axis) -> bool:
    return all(type(value) is int for step in axis.values for value in step)


def _steps(axis: Axis) -> list[str]:
    return [_step(axis, number) for number in range(len(axis.values))]


def _step(axis: Axis, number: int) -> str:
    return ", ".join(map(written, axis.values[number]))


def answer_text(table: Table, number: int) -> str:
    """Return "fits", "close" or "does not fit" for a configuration with a verdict."""
    return ANSWERS[int(table.verdict[number])].replace("-", " ")


def verdict_notes(table: Table) -> Iterator[str]:
    """Yield the number of replays, and why configurations are close, once per type of run."""
    replays = int(table.replayed.sum())
    if replays:
        yield f"{plural(replays, 'configuration')} replayed through a model of the PyTorch allocator."
    waiting = int((GrowthAxes(table).members() & table.can_replay & ~table.replayed).sum())
    if waiting:
        yield f"{waiting:,} of the Pareto front not replayed: the front gets at most {MOST_OF_FRONT} replays."
    unmodelled = {terms.unmodelled: None for terms in table.terms(table.valid) if terms.unmodelled}
    for names in unmodelled:
        yield f"Not modelled, so no configuration is certain to fit: {listed(names)}."
    sentences: dict[str, None] = {}
    for terms in table.terms(table.close & ~table.replayed):
        if not terms.unmodelled:
            hint = "Add --replay N to replay the N closest." if terms.replays else "These cannot be replayed."
            sentences[f"Close: {_range(terms)} {hint}"] = None
    for terms in table.terms(table.close & table.replayed):
        if not terms.unmodelled:
            sentences["Close after a replay: usable memory is inside the error range of recorded replays."] = None
    yield from sentences


def _range(terms: VerdictTerms) -> str:
    errors = terms.errors
    low, high = terms.ratio * (1 + errors.low), terms.ratio * (1 + errors.high)
    span = f"{low:.2f} to {high:.2f} times the allocated memory"
    if not errors.runs:
        return f"usable memory is inside {span}, a default: too few runs were recorded ({errors.run_type})."
    return f"usable memory is inside {span}, the range of {errors.runs} recorded runs ({errors.run_type})."
