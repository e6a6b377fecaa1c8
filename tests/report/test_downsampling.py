"""Maps with more cells than a picture can hold."""

from xml.etree import ElementTree as ET

import numpy as np
import pytest

from memcalc.report.sweeps.heatmaps import HeatMaps
from memcalc.report.sweeps.svg import MOST_CELLS, factors, heat_maps, merged
from memcalc.sweeping import evaluate


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1_000, 1_000), (1, 4_000_000), (3, 50_000), (100_000, 10)])
def test_no_picture_has_more_cells_than_it_may(rows: int, columns: int) -> None:
    down, across = factors(rows, columns, MOST_CELLS)

    assert -(-rows // down) * -(-columns // across) <= MOST_CELLS
    assert (down, across) == (1, 1) or rows * columns > MOST_CELLS or columns > 1_000


def test_a_cell_is_the_largest_of_its_configurations() -> None:
    """It fits where all of those that are valid do, and is close where none is too large.

    tensor_parallel = 5 divides no 12 heads.
    """
    table = evaluate("gpt2", {"b": range(1, 41), "tensor_parallel": [1, 5, 2, 3, 7]}, gpu="t4")
    (each,) = HeatMaps(table).maps()
    less = merged(each, 2, 8)

    assert less.columns == ["1 to 8", "9 to 16", "17 to 24", "25 to 32", "33 to 40"]
    assert less.rows == ["1 to 5", "2 to 3", "7"]
    for row in range(3):
        for column in range(5):
            block = np.s_[2 * row : 2 * row + 2, 8 * column : 8 * column + 8]
            valid = each.valid[block]
            assert less.valid[row, column] == valid.any()
            if valid.any():
                worst = valid & (each.verdict[block] == less.verdict[row, column])
                assert less.fraction[row, column] == each.fraction[block][worst].max()
                assert less.verdict[row, column] == each.verdict[block][valid].max()
    assert not less.valid[2].any()


def test_a_large_picture_says_what_its_cells_are() -> None:
    table = evaluate("gpt2", {"b": range(1, 301), "s": range(1, 101)}, gpu="t4")
    picture = heat_maps(table, "gpt2", "GiB")
    cells = [each for each in ET.fromstring(picture).iter() if each.tag.endswith("rect")]

    assert len(cells) == 15_000
    assert "each cell shows the largest of up to 2 configurations" in picture
    assert "micro_batch_size = 1 to 2, sequence_length = 1: at most" in picture


def test_maps_that_are_not_drawn_are_counted() -> None:
    axes = {"b": range(1, 9), "s": range(64, 72), "l": range(1, 9), "d": [96, 192, 384, 768, 1536, 3072, 6144]}

    assert "6 more maps are not drawn: vary less at a time" in heat_maps(evaluate("gpt2", axes), "gpt2", "GiB")
