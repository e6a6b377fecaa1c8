"""Heatmaps of a grid: two axes per map, one map per combination of the other fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.sweeping.grid import Axis, written
from memcalc.sweeping.table import Table
from memcalc.sweeping.verdict_terms import DOES_NOT_FIT, FITS, UNJUDGED


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
