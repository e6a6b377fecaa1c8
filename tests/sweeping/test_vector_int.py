"""Functions written for one number, run on many."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memcalc.sweeping.vector_int import VectorInt, elementwise, pieces
from memcalc.workspaces import ceil_div, round_up
from memcalc.workspaces.multiprocessors import Multiprocessors
from memcalc.workspaces.reductions import column_sum

A100 = Multiprocessors(108, 2048)
numbers = st.lists(st.integers(1, 2**20), min_size=1, max_size=40)


@given(rows=numbers)
def test_a_rule_with_decisions_gives_what_it_gives_for_each(rows):
    found = elementwise(
        lambda lanes: {"": sum(column_sum(lanes["r"], 768, A100)[:1])}, {"r": np.array(rows, dtype=np.float64)}
    )[""]

    assert np.broadcast_to(found, len(rows)).tolist() == [sum(column_sum(row, 768, A100)[:1]) for row in rows]


@given(values=numbers)
def test_arithmetic_is_that_of_integers(values):
    def several(lanes):
        n = lanes["n"]
        return {
            "bits": n.bit_length(),
            "power": 1 << (n.bit_length() - 1),
            "rounded": round_up(n, 128),
            "divided": ceil_div(1_000_003, n),
            "least": min(n, 4096),
            "rest": n % 7 + n // 4 - 3 // n,
        }

    found = elementwise(several, {"n": np.array(values, dtype=np.float64)})
    for name, column in found.items():
        expected = [int(several({"n": value})[name]) for value in values]
        assert np.broadcast_to(column, len(values)).tolist() == expected, name


def test_what_does_not_depend_on_lanes_stays_a_number():
    assert elementwise(lambda _: {"seven": 7}, {"n": np.array([1.0, 2])}) == {"seven": 7}


def test_arguments_part_where_decisions_do():
    asked = []

    def kinds(lanes):
        asked.append(lanes["n"].values.tolist())
        return {"": 10 * lanes["n"] if lanes["n"] % 10 > 4 else 7}

    found = elementwise(kinds, {"n": np.array([1.0, 2, 8, 9, 5])})[""]

    assert found.tolist() == [7, 7, 80, 90, 50]
    assert asked == [[1, 2, 8, 9, 5], [8, 9, 5], [1, 2]]


def test_results_of_any_kind_come_with_the_entries_that_they_are_for():
    found = [*pieces(lambda lanes: f"{lanes['n']} heads", {"n": np.array([4.0, 2, 4])})]

    assert {text: where.tolist() for where, text in found} == {"4 heads": [0, 2], "2 heads": [1]}


def test_what_is_remembered_for_some_numbers_holds_for_equal_ones():
    known = {VectorInt(np.array([1.0, 2])): "found"}

    assert known[VectorInt(np.array([1.0, 2]))] == "found"
    assert VectorInt(np.array([2.0, 1])) not in known
