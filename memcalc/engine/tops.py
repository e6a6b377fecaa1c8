"""The highest moment of a phase for each of many batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from memcalc.engine.atoms import Atoms, Bytes
from memcalc.engine.groups import Numbers, groups_of, learn_groups
from memcalc.engine.moments import Use, add_item
from memcalc.estimation.items import Item
from memcalc.estimation.program import Stream

MOST_KEPT = 4_194_304  # numbers that are kept of one set of batches


class Chunk(NamedTuple):
    """One chunk of a stage: its course, and the number of its first moment."""

    use: Use
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
        course = chunk.use.course
        phase = course.phase(self.stream, workspace=self.workspace is not None)
        candidate = phase.candidates[number - chunk.first]
        key = ("components", id(candidate))
        if key not in atoms.kept:
            atoms.kept[key] = candidate, course.components(atoms, candidate.holdings)
        held: Bytes = atoms.kept[key][1]
        table = fitted(held, len(atoms)) + course.components(atoms, chunk.use.others())
        items = _items(chunk.use, self.workspace)
        for slot, count in phase.buffers[number - chunk.first]:
            add_item(table, atoms, items[slot], count)
        return table


class Asked(NamedTuple):
    """A phase of a stage: the courses of its chunks, its stream, its workspace."""

    courses: list[Use]
    stream: Stream
    workspace: Item | None


def highest(phases: list[Asked], atoms: Atoms) -> list[Top]:
    """The highest moments of some phases. Chunks of a stage run one after the other: the one with the highest counts.

    Of moments that are equally high the first is meant, as in `estimation.timeline`.

    Raises:
        TooLarge: a size is beyond what arrays hold exactly.
    """
    if len(atoms.kept) * atoms.count > MOST_KEPT:
        atoms.kept.clear()
    keys = [_key(phase) for phase in phases]
    missing = {key: phase for key, phase in zip(keys, phases, strict=True) if key not in atoms.kept}
    learn_groups([(use.course, each) for each in missing.values() for use in each.courses], atoms)
    for key, phase in missing.items():
        atoms.kept[key] = _highest(phase, atoms)
    return [atoms.kept[key] for key in keys]


def _key(phase: Asked) -> tuple[object, ...]:
    sizes = tuple([(id(use.course), use.flights, *[_mark(item) for item in use.items]) for use in phase.courses])
    return ("top", sizes, phase.stream, None if phase.workspace is None else phase.workspace.block)


def _highest(phase: Asked, atoms: Atoms) -> Top:
    chunks: list[Chunk] = []
    best: Bytes | None = None
    winner: int | Numbers = 0
    first = 0
    for use in phase.courses:
        chunks.append(Chunk(use, first))
        own = _items(use, phase.workspace)
        others = _others(use, atoms)
        for group in groups_of(use.course, phase, atoms):
            around: Any = sum([own[slot].block * count for slot, count in group.buffers])
            height = group.bytes + (around + others)
            number = group.winner + first
            if best is None:
                best, winner = height, number
                continue
            higher = (height > best) | ((height == best) & (number < winner))
            if higher.all():
                best, winner = height, number
            elif higher.any():
                best, winner = np.where(higher, height, best), np.where(higher, number, winner)
        first += len(use.course.phase(phase.stream, workspace=phase.workspace is not None).candidates)
    assert best is not None, "a phase has a moment"
    return Top(chunks, phase.stream, phase.workspace, best, winner)


def _others(use: Use, atoms: Atoms) -> Bytes | int:
    """Bytes of what other micro-batches in flight hold. [n]"""
    if max(use.flights) == 1:
        return 0
    key = ("others", id(use.course), use.flights)
    if key not in atoms.kept:
        atoms.kept[key] = use.course, (use.course.counts(use.others()) @ use.course.sizes(atoms) @ atoms.table)[0]
    found: Bytes = atoms.kept[key][1]
    return found


def _items(use: Use, workspace: Item | None) -> list[Item]:
    return use.items if workspace is None else [*use.items, workspace]


def _mark(item: Item) -> tuple[object, ...]:
    """What tells items apart: their sizes, or the arrays of these."""
    each: Any = item.each  # an array where it differs from batch to batch
    return (id(each),) if isinstance(each, np.ndarray) else (item.component, each, item.block)


def fitted(table: Bytes, width: int) -> Bytes:
    """A table made when there were fewer atoms, or more, of which it has none."""
    missing = width - table.shape[1]
    if missing == 0:
        return table
    return np.concatenate([table, np.zeros((len(table), missing))], axis=1) if missing > 0 else table[:, :width]
