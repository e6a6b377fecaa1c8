"""Pareto front of a grid: the largest configurations that fit or are close."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from memcalc.sweeping.grid import Axis
from memcalc.sweeping.table import Flags, Table
from memcalc.sweeping.verdict_terms import CLOSE, DOES_NOT_FIT, FITS

Numbers = npt.NDArray[np.intp]

# Fields in which more is better: only configurations that differ in nothing else are compared.
SIZES = frozenset(
    {
        "training.micro_batch_size",
        "training.sequence_length",
        "training.gradient_accumulation_steps",
        "model.num_layers",
        "model.hidden_size",
        "model.intermediate_size",
        "model.vocab_size",
    }
)


class GrowthAxes:
    """The axes of a grid along which runs grow.

    Args:
        table: table of a whole grid.
    """

    def __init__(self, table: Table) -> None:
        if len(table) != table.grid.size:
            raise ValueError("a Pareto front is that of a whole grid")
        self._table = table
        axes = table.grid.axes
        self._orders = {number: _order(axis) for number, axis in enumerate(axes) if _grows(axis)}

    def members(self) -> Flags:
        """Return whether each configuration is on the Pareto front. [n]

        It fits or is close, no smaller configuration fails to fit, and no larger one also qualifies. A configuration is
        larger than another if no field of `SIZES` is smaller, at least one is larger, and all other fields are equal.
        """
        verdict = self._sorted(self._table.verdict)
        beyond = verdict == DOES_NOT_FIT
        for axis in self._orders:
            beyond = np.logical_or.accumulate(beyond, axis=axis)
        candidates = ((verdict == FITS) | (verdict == CLOSE)) & ~beyond
        as_large = candidates
        for axis in self._orders:
            as_large = np.flip(np.logical_or.accumulate(np.flip(as_large, axis), axis=axis), axis)
        members = candidates.copy()
        for axis in self._orders:
            rest = [slice(None)] * members.ndim
            rest[axis] = slice(None, -1)
            larger = rest.copy()
            larger[axis] = slice(1, None)
            members[tuple(rest)] &= ~as_large[tuple(larger)]
        for axis, order in self._orders.items():
            members = members.take(np.argsort(order), axis=axis)
        found: Flags = members.ravel()
        return found

    def smaller(self, index: int) -> list[int]:
        """Return the configurations smaller than `index` along the axis with most values, in ascending order."""
        if not self._orders:
            return []
        axis = max(self._orders, key=lambda number: len(self._orders[number]))
        shape = self._table.grid.shape
        place = list(np.unravel_index(index, shape))
        return [
            int(np.ravel_multi_index((*place[:axis], step, *place[axis + 1 :]), shape))
            for step in self._until(axis, place[axis])
        ]

    def _until(self, axis: int, step: np.intp) -> Iterator[int]:
        """Yield the steps of an axis that have smaller values than `step`, in ascending order."""
        for other in self._orders[axis].tolist():
            if other == step:
                return
            yield other

    def _sorted(self, values: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
        found = values.reshape(self._table.grid.shape)
        for axis, order in self._orders.items():
            found = found.take(order, axis=axis)
        return found


def _grows(axis: Axis) -> bool:
    return len(axis.fields) == 1 and axis.fields[0] in SIZES and all(type(value) is int for (value,) in axis.values)


def _order(axis: Axis) -> Numbers:
    found: Numbers = np.argsort(np.array([value for (value,) in axis.values]), kind="stable")
    return found
