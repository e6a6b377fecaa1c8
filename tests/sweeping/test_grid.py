"""Axes, their numbering, and what is refused."""

import pytest

from memcalc.errors import InputError
from memcalc.sweeping import Grid


def test_the_last_axis_runs_fastest_and_symbols_become_full_names():
    grid = Grid({"recompute": ["none", "full"], "b": [1, 2, 4]})
    assert grid.shape == (2, 3)
    assert grid.size == 6
    points = [grid.point(number) for number in range(grid.size)]
    assert points[0] == {"training.recompute": "none", "training.micro_batch_size": 1}
    assert points[2] == {"training.recompute": "none", "training.micro_batch_size": 4}
    assert points[3] == {"training.recompute": "full", "training.micro_batch_size": 1}


def test_fields_of_one_axis_change_together():
    grid = Grid({("tensor_parallel", "data_parallel"): [(1, 8), (8, 1)], "b": [1, 2]})
    assert grid.size == 4
    assert grid.point(2) == {
        "parallelism.tensor_parallel": 8,
        "parallelism.data_parallel": 1,
        "training.micro_batch_size": 1,
    }


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"micro_batch": [1]}, "grid: unknown field 'micro_batch'. Did you mean micro_batch_size?"),
        (
            {"b": [1], "micro_batch_size": [2]},
            "grid: training.micro_batch_size is varied twice. Give each field one list of values.",
        ),
        ({"b": []}, "training.micro_batch_size: the list of values is empty. Add at least one value."),
        (
            {("b", "s"): [(1, 2), (1,)]},
            (
                "grid: [1] does not have a value for each of training.micro_batch_size, training.sequence_length. "
                "Write as many values as names."
            ),
        ),
    ],
)
def test_what_is_no_grid_is_refused(axes, message):
    with pytest.raises(InputError) as caught:
        Grid(axes)
    assert str(caught.value) == message
