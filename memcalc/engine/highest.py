"""The highest of several sums of atoms, for each of many batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.intp]
Levels = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

COLUMNS = 2048  # batches whose sums are held against each other at a time: they stay in the processor's cache


def highest(forms: Bytes, ends: Numbers, atoms: Bytes) -> tuple[Bytes, Levels]:
    """The largest of each segment of forms, and which one it is: the first of equal ones.

    Args:
        forms: how often each has each atom. [forms, atoms]
        ends: where segments begin, and where the last one ends; none is empty. [segments + 1]
        atoms: the arrays. [atoms, n]

    Returns:
        [segments, n], [segments, n]: numbers within the segment.
    """
    count, sizes = atoms.shape[1], np.diff(ends)
    order = np.argsort(-sizes, kind="stable")  # so that those with a further form are the first ones
    back = np.argsort(order)
    having = np.searchsorted(
        -sizes[order], -np.arange(sizes.max(initial=1))
    ).tolist()  # so many have a form of each number
    by_number = forms[np.concatenate([ends[order[:several]] + number for number, several in enumerate(having)])]
    heights = np.empty((len(sizes), count))
    winners = np.empty((len(sizes), count), dtype=np.int32)
    for start in range(0, count, COLUMNS):
        lanes = slice(start, start + COLUMNS)
        best, *further = np.split(by_number @ atoms[:, lanes], np.cumsum(having)[:-1])
        level = np.zeros(best.shape, dtype=np.int32)
        for number, own in enumerate(further, 1):
            known = best[: len(own)]
            np.copyto(level[: len(own)], number, where=own > known)
            np.maximum(own, known, out=known)
        heights[:, lanes] = best[back]
        winners[:, lanes] = level[back]
    return heights, winners


def ever_highest(forms: Bytes, atoms: Bytes, never_zero: Flags) -> list[int]:
    """Which of some sums are the largest for some batch, the first of equal ones.

    Args:
        forms: how often each has each atom. [forms, atoms]
        atoms: the arrays. [atoms, n]
        never_zero: which of them are not for any batch. [atoms]
    """
    if atoms.shape[1] <= COLUMNS:  # weighing all takes no longer than looking for those that others contain
        return list(np.bincount((atoms.T @ forms.T).argmax(axis=1)).nonzero()[0].tolist())
    kept = not_contained(forms, never_zero)
    if len(kept) == 1:
        return kept
    several = forms[kept]
    used = several.any(axis=0)
    rows = several[:, used] @ atoms[used]
    largest = rows == rows.max(axis=0)
    found = []
    for number, row in zip(kept, largest, strict=True):
        if row.any():
            found.append(number)
            largest &= ~row  # those behind it are not the first
    return found


def not_contained(counts: npt.NDArray[Any], never_zero: Flags) -> list[int]:
    """Which sums no other one is as large as whatever the sizes are, but that some are never zero.

    Args:
        counts: how often each sum has each size. [sums, sizes]
        never_zero: which sizes are not. [sizes]
    """
    columns = counts.T
    contains = (columns[:, :, None] >= columns[:, None, :]).all(axis=0)
    always = counts[:, never_zero].sum(axis=1)  # of those that contain another one the larger have more of some size
    earlier = np.tri(len(counts), k=-1, dtype=np.bool_).T
    contained = (contains & ((always[:, None] > always) | earlier)).any(axis=0)
    found: list[int] = np.flatnonzero(~contained).tolist()
    return found
