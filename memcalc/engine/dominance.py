"""Moments weighed against one another: of those that are written for all batches, most are the highest for none."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.intp]

COLUMNS = 2048  # configurations whose moments are weighed at a time: they stay in the processor's cache
SAMPLES = 5  # configurations whose highest moments are held against all others


class Ranged(Protocol):
    """Arrays of which forms are sums."""

    @property
    def ranges(self) -> tuple[Bytes, Bytes]:
        """The smallest and the largest number of each. [atoms], [atoms]"""

    def samples(self, most: int) -> Bytes:
        """The arrays of a few configurations. [atoms, at most `most`]"""


def not_lower(forms: Bytes, ends: Numbers, atoms: Ranged) -> Numbers:
    """The rows that may be the highest of their segment for some batch, the first of equal ones.

    Each is held against those that are the highest for a few batches: where a row is lower in whatever the atoms may
    be, it is out.

    Args:
        forms: how often each moment has each atom. [moments, atoms]
        ends: where segments begin, and where the last one ends; none is empty. [segments + 1]
        atoms: what they are made of.
    """
    low, high = atoms.ranges
    rows = np.arange(len(forms))
    samples = atoms.samples(SAMPLES)
    for sample in reversed(range(samples.shape[1])):  # the largest batch first: it leaves fewest
        sizes = np.diff(ends)
        if len(sizes) == len(rows):
            break
        left = forms if len(rows) == len(forms) else forms[rows]
        segment = np.repeat(np.arange(len(sizes)), sizes)
        heights = left @ samples[:, sample]
        highest = np.flatnonzero(heights == np.maximum.reduceat(heights, ends[:-1])[segment])
        winner = highest[np.searchsorted(segment[highest], np.arange(len(sizes)))][segment]
        more = left[winner] - left
        least = np.maximum(more, 0) @ low + np.minimum(more, 0) @ high  # that the winner is higher
        stays = (least < 0) | ((least == 0) & (winner >= np.arange(len(rows))))
        rows = rows[stays]
        ends = np.concatenate([[0], np.cumsum(np.add.reduceat(stays, ends[:-1], dtype=np.intp))])
    return rows


def first_highest(forms: Bytes, atoms: Bytes) -> tuple[Bytes, Numbers]:
    """The largest of some forms for each configuration, and the first that has it."""
    count = atoms.shape[1]
    winners = np.zeros(count, dtype=np.intp)
    heights = np.empty(count)
    for start in range(0, count, COLUMNS):
        part = slice(start, start + COLUMNS)
        rows = forms @ atoms[:, part]
        best, winner = rows[0], winners[part]
        for number in range(1, len(rows)):
            np.copyto(winner, number, where=rows[number] > best)
            np.maximum(best, rows[number], out=best)
        heights[part] = best
    return heights, winners
