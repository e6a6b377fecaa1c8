"""The highest moment of a phase for each of many batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import Atoms, Bytes
from memcalc.engine.moments import Course, add_item, not_lower
from memcalc.estimation.items import Item
from memcalc.estimation.program import Stream

COLUMNS = 2048  # configurations whose moments are weighed at a time: they stay in the processor's cache

MOST_KEPT = 4_194_304  # numbers that are kept of one set of batches

Numbers = npt.NDArray[np.intp]


class Chunk(NamedTuple):
    """One chunk of a stage: its course, what its slots stand for, and the number of its first moment."""

    course: Course
    items: list[Item]
    first: int


class Top(NamedTuple):
    """The highest moments of a phase, over all chunks of a stage.

    Args:
        chunks: where the moments come from.
        stream: of which phase.
        workspace: what the first matrix product of backward makes.
        bytes: how high they are. [n]
        winner: the number of the moment; an array where they differ. [n]
    """

    chunks: list[Chunk]
    stream: Stream
    workspace: Item | None
    bytes: Bytes
    winner: int | Numbers

    def components(self, atoms: Atoms, number: int) -> Bytes:
        """What is alive in one moment, by component: how often each has each atom. [components, atoms]"""
        chunk = [each for each in self.chunks if each.first <= number][-1]
        phase = chunk.course.phase(self.stream, workspace=self.workspace is not None)
        candidate = phase.candidates[number - chunk.first]
        key = ("components", id(candidate))
        if key not in atoms.kept:
            atoms.kept[key] = candidate, chunk.course.components(atoms, candidate)
        held: Bytes = atoms.kept[key][1]
        table = fitted(held, len(atoms))
        if table is held:
            table = held.copy()
        items = _items(chunk, self.workspace)
        for slot, count in phase.buffers[number - chunk.first]:
            add_item(table, atoms, items[slot], count)
        return table


class _Group(NamedTuple):
    """Moments with the same buffers around them: the highest of these, and which it is."""

    buffers: tuple[tuple[int, int], ...]
    bytes: Bytes
    winner: int | Numbers


def highest(courses: list[tuple[Course, list[Item]]], stream: Stream, workspace: Item | None, atoms: Atoms) -> Top:
    """Chunks of a stage run one after the other: of each phase the one with the highest moment counts.

    Of moments that are equally high the first is meant, as in `estimation.timeline`.

    Raises:
        TooLarge: a size is beyond what arrays hold exactly.
    """
    sizes = tuple((id(course), *(_mark(item) for item in items)) for course, items in courses)
    key = ("top", sizes, stream, None if workspace is None else workspace.block)
    if key not in atoms.kept:
        if len(atoms.kept) * atoms.count > MOST_KEPT:
            atoms.kept.clear()
        atoms.kept[key] = _highest(courses, stream, workspace, atoms)
    top: Top = atoms.kept[key]
    return top


def _highest(courses: list[tuple[Course, list[Item]]], stream: Stream, workspace: Item | None, atoms: Atoms) -> Top:
    chunks: list[Chunk] = []
    best: Bytes | None = None
    winner: int | Numbers = 0
    first = 0
    for course, items in courses:
        chunk = Chunk(course, items, first)
        chunks.append(chunk)
        own = _items(chunk, workspace)
        for group in _groups(course, stream, atoms, workspace=workspace is not None):
            around: Any = sum(own[slot].block * count for slot, count in group.buffers)
            height = group.bytes + around
            number = group.winner + first
            if best is None:
                best, winner = height, number
                continue
            higher = (height > best) | ((height == best) & (number < winner))
            if higher.all():
                best, winner = height, number
            elif higher.any():
                best, winner = np.where(higher, height, best), np.where(higher, number, winner)
        first += len(course.phase(stream, workspace=workspace is not None).candidates)
    assert best is not None, "a phase has a moment"
    return Top(chunks, stream, workspace, best, winner)


def _groups(course: Course, stream: Stream, atoms: Atoms, *, workspace: bool) -> list[_Group]:
    key = ("groups", id(course), stream, workspace)
    if key not in atoms.kept:
        phase = course.phase(stream, workspace=workspace)
        forms = phase.counts @ course.sizes(atoms)
        alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for number, buffers in enumerate(phase.buffers):
            alike.setdefault(buffers, []).append(number)
        found = []
        for buffers, several in alike.items():
            numbers = np.array(several)
            numbers = numbers[not_lower(forms[numbers], *atoms.ranges)]
            height, which = first_highest(forms[numbers], atoms.table)
            found.append(_Group(buffers, height, int(numbers[0]) if which is None else numbers[which]))
        atoms.kept[key] = course, found
    groups: list[_Group] = atoms.kept[key][1]
    return groups


def _items(chunk: Chunk, workspace: Item | None) -> list[Item]:
    return chunk.items if workspace is None else [*chunk.items, workspace]


def _mark(item: Item) -> tuple[object, ...]:
    """What tells items apart: their sizes, or the arrays of these."""
    each: Any = item.each  # an array where it differs from batch to batch
    return (id(each),) if isinstance(each, np.ndarray) else (item.component, each, item.block)


def first_highest(forms: Bytes, atoms: Bytes) -> tuple[Bytes, Numbers | None]:
    """The largest of some forms for each configuration, and the first that has it; None where there is one."""
    if len(forms) == 1:
        return forms[0] @ atoms, None
    count = atoms.shape[1]
    heights, winners = np.empty(count), np.zeros(count, dtype=np.intp)
    for start in range(0, count, COLUMNS):
        part = slice(start, start + COLUMNS)
        rows = forms @ atoms[:, part]
        best, winner = rows[0], winners[part]
        for number in range(1, len(rows)):
            np.copyto(winner, number, where=rows[number] > best)
            np.maximum(best, rows[number], out=best)
        heights[part] = best
    return heights, winners


def fitted(table: Bytes, width: int) -> Bytes:
    """A table made when there were fewer atoms, or more, of which it has none."""
    missing = width - table.shape[1]
    if missing == 0:
        return table
    return np.concatenate([table, np.zeros((len(table), missing))], axis=1) if missing > 0 else table[:, :width]
