"""Boundary search: doubling, bisection, then the next larger values.

The "largest" value fits, and the next NEIGHBORS larger values do not. The peak grows with the size of a batch, a
sequence or a model, but not monotonically: the allocator fragments, kernels use other workspaces at other sizes, and
dimensions padded to a multiple (PyTorch pads attention masks to 8 columns) need less at multiples than between them.
Such a peak rises along every NEIGHBORS-th value. So after the bisection the values above the boundary are tried, too,
and if one of them fits, the search continues along every NEIGHBORS-th value from there.
The allocator rounds large segments to 2 MiB, so round values can fit beyond others that do not: with `round_places`,
the next NEIGHBORS of these indices are tried as well.
A still larger value could fit only if the peak fell by more than it grows over NEIGHBORS steps. Not all smaller values
are tried: each is a replay, and users who search for the largest value run the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

NEIGHBORS = 8


@dataclass(frozen=True, slots=True)
class FitBoundary:
    """The fit boundary of a sequence of values."""

    value: int  # the largest that fits; 0: none does
    next_value: int | None  # the next one, which does not fit; None: the sequence ends
    tried: dict[int, bool]  # every value tried, and whether it fits
    gaps: tuple[int, ...]  # smaller values tried that do not fit, although `value` does
    above: int  # number of next larger values tried that do not fit: NEIGHBORS, or fewer at the end of the sequence


def fit_boundary(
    ladder: Sequence[int],
    fits: Callable[[int], bool],
    start: int = 0,
    step: int = 1,
    least: int = -1,
    round_places: int = 0,
) -> FitBoundary:
    """Return the largest of increasing values that fits: doubling, bisection, then the next values.

    Args:
        ladder: increasing values; a list or a range.
        fits: called once for each value.
        start: the index at which the search starts.
        step: the first step size from there, in indices.
        least: a lower bound of the result's index if it fits, for example the unchanged run's; -1: none.
        round_places: a value is round at every multiple of this, counting indices from 1; 0: no value is.
    """
    tried: dict[int, bool] = {}

    def at(place: int) -> bool:
        value = ladder[place]
        if value not in tried:
            tried[value] = fits(value)
        return tried[value]

    low = _bisected(at, *_bracket(len(ladder), at, start, step))
    if low < least < len(ladder) and at(least):
        low = _bisected(at, *_bracket(len(ladder), at, least))
    low = _climbed(len(ladder), at, low)
    if round_places and low >= 0:
        low = _rounded(len(ladder), at, low, round_places)
    if low < 0:
        return FitBoundary(0, ladder[0] if ladder else None, tried, (), min(NEIGHBORS, len(ladder)))
    gaps = tuple(sorted(value for value, fitted in tried.items() if value < ladder[low] and not fitted))
    above = min(NEIGHBORS, len(ladder) - low - 1)
    return FitBoundary(ladder[low], ladder[low + 1] if above else None, tried, gaps, above)


def bracket_and_bisect(length: int, at: Callable[[int], bool], start: int) -> int:
    """Return an index where `at` is true and false for the next; -1 if it was never true."""
    return _bisected(at, *_bracket(length, at, start))


def _bracket(length: int, at: Callable[[int], bool], start: int, step: int = 1) -> tuple[int, int]:
    """Return an index that fits (or -1) and a later one that does not (or the end)."""
    if length == 0:
        return -1, 0
    place = min(start, length - 1)
    if at(place):
        low = place
        while low + step < length and at(low + step):
            low, step = low + step, 2 * step
        return low, min(low + step, length)
    high = place
    while high - step >= 0 and not at(high - step):
        high, step = high - step, 2 * step
    return max(high - step, -1), high


def _climbed(length: int, at: Callable[[int], bool], low: int) -> int:
    """Return the last index that fits, after trying its NEIGHBORS successors."""
    while True:
        above = [place for place in range(low + 1, min(length, low + 1 + NEIGHBORS)) if at(place)]
        if not above:
            return low
        low = max(_last_alike(length, at, place) for place in above)


def _rounded(length: int, at: Callable[[int], bool], low: int, every: int) -> int:
    """Return the last index that fits, after also trying the NEIGHBORS round values after it."""
    while True:
        first = (low + 1) // every * every + every - 1  # the next index for which index + 1 is a multiple
        fitting = [place for place in range(first, min(length, first + NEIGHBORS * every), every) if at(place)]
        if not fitting:
            return low
        low = _climbed(length, at, fitting[-1])


def _last_alike(length: int, at: Callable[[int], bool], place: int) -> int:
    """Return the last fitting index in steps of NEIGHBORS from one that fits."""
    alike = range(place, length, NEIGHBORS)
    low, high = _bracket(len(alike), lambda step: at(alike[step]), 0)
    return alike[_bisected(lambda step: at(alike[step]), low, high)]


def _bisected(at: Callable[[int], bool], low: int, high: int) -> int:
    """Return by bisection an index that fits while its successor does not."""
    while high - low > 1:
        middle = (low + high) // 2
        if at(middle):
            low = middle
        else:
            high = middle
    return low
