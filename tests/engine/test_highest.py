"""The highest of several sums, beside one that is found number by number."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.engine import highest as module
from memcalc.engine.highest import ever_highest, highest

small = st.integers(0, 3)


@given(data=st.data())
def test_it_is_the_first_of_the_largest_of_each_segment(data):
    atoms, batches = 3, data.draw(st.integers(1, 9))
    rows = st.lists(small, min_size=atoms, max_size=atoms)
    segments = data.draw(st.lists(st.lists(rows, min_size=1, max_size=6), min_size=1, max_size=4))
    column = st.lists(st.integers(0, 5), min_size=batches, max_size=batches)
    table: Any = np.array([data.draw(column) for _ in range(atoms)], dtype=float)
    ends = np.cumsum([0, *map(len, segments)])
    forms = np.array([row for segment in segments for row in segment], dtype=float)

    heights, winners = highest(forms, ends, table)

    for number, (start, stop) in enumerate(pairwise(ends)):
        own = forms[start:stop] @ table
        assert heights[number].tolist() == own.max(axis=0).tolist()
        assert winners[number].tolist() == own.argmax(axis=0).tolist()


def test_batches_are_taken_in_pieces(monkeypatch):
    monkeypatch.setattr(module, "COLUMNS", 2)
    heights, winners = highest(
        np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), np.array([0, 3]), np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]])
    )
    assert heights.tolist() == [[2.0, 2.0, 3.0]]
    assert winners.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("columns", [0, module.COLUMNS])
@given(data=st.data())
def test_those_that_are_ever_the_highest_are_the_first_of_the_largest_of_some_batch(columns, data):
    atoms, batches = 3, data.draw(st.integers(1, 9))
    forms = np.array(
        data.draw(st.lists(st.lists(small, min_size=atoms, max_size=atoms), min_size=1, max_size=8)), float
    )
    column = st.lists(st.integers(0, 5), min_size=batches, max_size=batches)
    table: Any = np.array([data.draw(column) for _ in range(atoms)], dtype=float)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COLUMNS", columns)  # many batches, and few
        found = ever_highest(forms, table, table.all(axis=1))

    assert found == sorted(set((forms @ table).argmax(axis=0).tolist()))
