"""Maps with fewer cells, for a picture that a browser can still open: neighbors become one cell."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memcalc.report.sweeps.heatmaps import HeatMap

MOST_CELLS = 20_000  # of a picture: three megabytes
MOST_MAPS = 50
WIDEST = 1_000  # cells in a row


def factors(rows: int, columns: int, most: int) -> tuple[int, int]:
    """How many rows and columns become one, so that no more than `most` cells are left."""
    down = across = 1
    while (left := -(-columns // across)) > WIDEST or left * -(-rows // down) > max(most, 1):
        if left > WIDEST or left >= -(-rows // down):
            across += 1
        else:
            down += 1
    return down, across


def merged(each: HeatMap, down: int, across: int) -> HeatMap:
    """Return the map with groups of rows and columns merged: each cell is the configuration that needs most.

    A merged cell fits if all its valid configurations fit, and does not fit if one does not.
    """
    # Invalid configurations come last, then those outside the map; those that do not fit before close ones.
    needs = np.where(each.valid, each.fraction + 1e9 * each.verdict, -1.0)
    heights, widths = (-(-size // factor) for size, factor in zip(needs.shape, (down, across), strict=True))
    padded = np.full((heights * down, widths * across), -2.0)
    padded[: needs.shape[0], : needs.shape[1]] = needs
    blocks = padded.reshape(heights, down, widths, across).transpose(0, 2, 1, 3).reshape(heights, widths, -1)
    inner = blocks.argmax(axis=2)
    row = np.arange(heights)[:, None] * down + inner // across
    column = np.arange(widths)[None, :] * across + inner % across
    place: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] = (row, column)
    return HeatMap(
        each.other_axes,
        _labels(each.rows, down),
        _labels(each.columns, across),
        each.numbers[place],
        each.fraction[place],
        each.verdict[place],
        each.valid[place],
    )


def _labels(names: list[str], factor: int) -> list[str]:
    """Return the first and the last value of each group."""
    groups = (names[start : start + factor] for start in range(0, len(names), factor))
    return [group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in groups]
