"""Moments that are weighed against one another: none that is the highest for some batch is left out."""

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memcalc.engine.dominance import first_highest, not_lower


class Table:
    """Some atoms with their ranges."""

    def __init__(self, table: np.ndarray[Any, Any]) -> None:
        self.table = table

    @property
    def ranges(self) -> tuple[Any, Any]:
        """The smallest and the largest number of each."""
        return self.table.min(axis=1), self.table.max(axis=1)

    def samples(self, most: int) -> Any:
        """The first few configurations."""
        return self.table[:, :most]


small = st.integers(0, 3)


@given(data=st.data())
def test_every_moment_that_is_the_highest_for_some_batch_is_kept(data):
    atoms, batches = 3, data.draw(st.integers(1, 9))
    rows = st.lists(small, min_size=atoms, max_size=atoms)
    segments = data.draw(st.lists(st.lists(rows, min_size=1, max_size=6), min_size=1, max_size=4))
    column = st.lists(st.integers(0, 5), min_size=batches, max_size=batches)
    table: Any = Table(np.array([data.draw(column) for _ in range(atoms)], dtype=float))
    ends = np.cumsum([0, *map(len, segments)])
    forms = np.array([row for segment in segments for row in segment], dtype=float)

    kept = not_lower(forms, ends, table)

    for start, stop in pairwise(ends):
        heights = forms[start:stop] @ table.table
        winners = {int(start + number) for number in heights.argmax(axis=0)}  # the first of equal ones
        assert winners <= set(kept.tolist())


def test_of_equal_moments_the_first_is_meant():
    forms = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    heights, winners = first_highest(forms, np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]]))
    assert heights.tolist() == [2.0, 2.0, 3.0]
    assert winners.tolist() == [1, 0, 0]
