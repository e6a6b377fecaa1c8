"""The order in which configurations stand while they are sized: those of one context are neighbours.

Of a grid whose batches are its first axes the configurations of a context lie far apart, and writing each of them where
it belongs would take longer than sizing it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from memcalc.engine.reading import BATCH

Array = np.ndarray[Any, Any]


class Order:
    """The axes of contexts before those of batches.

    Args:
        shape: how many values each axis of the grid has.
        inner: the axes of batches, by their numbers: which field of `BATCH` each is.

    Attributes:
        outer: the other axes.
    """

    def __init__(self, shape: tuple[int, ...], inner: Mapping[int, str]) -> None:
        self.outer = [number for number in range(len(shape)) if number not in inner]
        self._axes = [*self.outer, *inner]
        self._shape = [shape[number] for number in self._axes]
        self._fields = [*inner.values()]

    def by_context(self, array: Array) -> Array:
        """A view of columns by the outer axes and all of `BATCH`. [..., n] -> [..., *outer, *batch]"""
        before = array.ndim - 1 + len(self.outer)
        view = array.reshape(*array.shape[:-1], *self._shape)
        own = [before + self._fields.index(field) for field in BATCH if field in self._fields]
        absent = [before + number for number, field in enumerate(BATCH) if field not in self._fields]
        return np.expand_dims(view.transpose(*range(before), *own), absent)

    def to_grid(self, columns: Iterable[Array]) -> None:
        """Put columns into the order of the grid, one by one, so that there is no second table of them. [n] each"""
        if self._axes != sorted(self._axes):
            for column in columns:
                column[:] = column.reshape(self._shape).transpose(np.argsort(self._axes)).ravel()
