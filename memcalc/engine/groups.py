"""Moments of phases weighed against one another, those of many phases at once: most are the highest for no batch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import Atoms, Bytes
from memcalc.engine.moments import Course
from memcalc.estimation.items import Item
from memcalc.estimation.program import Stream

COLUMNS = 2048  # configurations whose moments are weighed at a time: they stay in the processor's cache
SAMPLES = 5  # configurations whose highest moments are held against all others

Numbers = npt.NDArray[np.intp]


class Phase(Protocol):
    """Which phase of a course is meant."""

    @property
    def stream(self) -> Stream:
        """Its stream."""

    @property
    def workspace(self) -> Item | None:
        """What the first matrix product of backward makes."""


class Group(NamedTuple):
    """Moments with the same buffers around them: the highest of these, and which it is. [n]"""

    buffers: tuple[tuple[int, int], ...]
    bytes: Bytes
    winner: int | Numbers


def groups_of(course: Course, phase: Phase, atoms: Atoms) -> list[Group]:
    """The moments of one phase, those with the same buffers together."""
    key = _key(course, phase)
    if key not in atoms.kept:
        learn_groups([(course, phase)], atoms)
    groups: list[Group] = atoms.kept[key][1]
    return groups


def learn_groups(phases: Iterable[tuple[Course, Phase]], atoms: Atoms) -> None:
    """Find the groups of several phases, which takes hardly longer than those of one.

    Raises:
        TooLarge: a size is beyond what arrays hold exactly.
    """
    missing = {key: each for each in phases if (key := _key(*each)) not in atoms.kept}
    if not missing:
        return
    for course, _ in missing.values():
        course.learn(atoms)
    rows: list[Bytes] = []
    numbers: list[Numbers] = []  # of the moments of each segment, which are those of one group
    segments: list[tuple[tuple[object, ...], tuple[tuple[int, int], ...]]] = []
    for key, (course, which) in missing.items():
        phase = course.phase(which.stream, workspace=which.workspace is not None)
        forms = phase.counts @ course.sizes(atoms)
        for buffers, several in phase.groups:
            rows.append(forms[several])
            numbers.append(several)
            segments.append((key, buffers))
    forms, ends = np.concatenate(rows), np.cumsum([0, *map(len, rows)])
    number = np.concatenate(numbers)
    kept = not_lower(forms, ends, atoms)
    parts = np.searchsorted(kept, ends)
    for key, (course, _) in missing.items():
        atoms.kept[key] = course, []
    single = kept[parts[:-1][np.diff(parts) == 1]]
    alone = iter(forms[single] @ atoms.table)
    for (key, buffers), (start, stop) in zip(segments, pairwise(parts.tolist()), strict=True):
        if stop - start == 1:
            group = Group(buffers, next(alone), int(number[kept[start]]))
        else:
            several = kept[start:stop]
            height, which_one = first_highest(forms[several], atoms.table)
            group = Group(buffers, height, number[several][which_one])
        atoms.kept[key][1].append(group)


def _key(course: Course, phase: Phase) -> tuple[object, ...]:
    return ("groups", id(course), phase.stream, phase.workspace is not None)


def not_lower(forms: Bytes, ends: Numbers, atoms: Atoms) -> Numbers:
    """The rows that may be the highest of their segment for some batch, the first of equal ones.

    Each is held against those that are the highest for a few batches: where a row is lower in whatever the atoms may
    be, it is out.

    Args:
        forms: how often each moment has each atom. [moments, atoms]
        ends: where segments begin, and where the last one ends. [segments + 1]
        atoms: what they are made of.
    """
    starts, sizes = ends[:-1], np.diff(ends)
    if len(starts) == len(forms):
        return starts
    heights = forms @ atoms.samples(SAMPLES)
    segment = np.repeat(np.arange(len(starts)), sizes)
    highest = np.maximum.reduceat(heights, starts, axis=0)[segment]
    rows = np.arange(len(forms))
    winners = np.minimum.reduceat(np.where(heights == highest, rows[:, None], len(forms)), starts, axis=0)
    low, high = atoms.ranges
    lower = np.zeros(len(forms), dtype=np.bool_)
    for sample in range(winners.shape[1]):
        if sample and (winners[:, sample] == winners[:, sample - 1]).all():
            continue
        winner = winners[segment, sample]
        more = forms[winner] - forms
        least = np.maximum(more, 0) @ low + np.minimum(more, 0) @ high  # that the winner is higher
        lower |= (least > 0) | ((least >= 0) & (winner < rows))
    return np.flatnonzero(~lower)


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
