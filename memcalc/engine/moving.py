"""What comes and goes on a stage: the moments of its phases that may be their highest, as sums of atoms."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from memcalc.engine.atoms import Atoms, Bytes, fitted
from memcalc.engine.courses import Use, flights, layers
from memcalc.engine.moments import Counts, Family, Numbers, Streams, add_item, at_layers
from memcalc.estimation.items import PHASES, Item
from memcalc.estimation.passes import Pass


class Alike(NamedTuple):
    """Passes in which the same stands around the layers.

    Args:
        uses: the courses of a stage's chunks.
        passes: of which phases.
    """

    uses: list[Use]
    passes: tuple[Pass, ...]

    @property
    def streams(self) -> Streams:
        """The passes as a course knows them."""
        return tuple([(each.stream, each.workspace is not None) for each in self.passes])


class Sized(NamedTuple):
    """The moments of some phases of a course, without those that another one exceeds for all batches.

    Args:
        forms: what blocks hold: how often it has each atom, however many layers there are, and for each layer.
            [2, moments, atoms]
        buffers: how many of each of the engine's buffers stand around it, and of the workspace, likewise.
            [2, moments, slots]
        numbers: which of the course's moments it is. [moments]
        ends: where those of each phase begin, and where the last ones end. [phases + 1]
    """

    forms: Bytes
    buffers: Counts
    numbers: Numbers
    ends: Numbers


class Known(NamedTuple):
    """The moments of some passes over all chunks of a stage, in order of the passes.

    Args:
        forms: their bytes. [moments, atoms]
        ends: where those of each pass begin, and where the last ones end. [passes + 1]
        chunks: which of the chunks each is of. [moments]
        numbers: which of the course's moments it is. [moments]
    """

    forms: Bytes
    ends: Numbers
    chunks: Numbers
    numbers: Numbers


class Moving:
    """The moments of one stage that may be the highest of their phases.

    Args:
        several: all passes.
        atoms: what sizes are made of.

    Attributes:
        forms: the bytes of each moment, those of one pass after those of another. [moments, atoms]
        sizes: how many moments each pass has. [passes]
        pass_of: the number of the pass of each phase; that behind the last one where nothing moves. [phases]
    """

    def __init__(self, several: list[Alike], atoms: Atoms) -> None:
        self._known = [(alike, _known(alike, atoms)) for alike in several]
        self.forms: Bytes = np.concatenate([known.forms for _, known in self._known])
        self.sizes: Numbers = np.concatenate([np.diff(known.ends) for _, known in self._known])
        self.pass_of = _pass_of(tuple([which.mask for alike in several for which in alike.passes]))
        self._components: dict[tuple[int, int], Bytes] = {}

    def components(self, atoms: Atoms, phase: int, moment: int) -> Bytes | None:
        """What is alive in one of the moments of a phase, by component; None: nothing. [components, atoms]"""
        number = int(self.pass_of[phase])
        if number == len(self.sizes):
            return None
        key = (number, moment)
        if key not in self._components:
            self._components[key] = self._find_components(atoms, number, moment)
        return self._components[key]

    def _find_components(self, atoms: Atoms, number: int, moment: int) -> Bytes:
        for alike, known in self._known:
            if number < len(alike.passes):
                row = known.ends[number] + moment
                use = alike.uses[known.chunks[row]]
                return _components(use, alike, number, int(known.numbers[row]), atoms)
            number -= len(alike.passes)
        raise IndexError(number)


def _known(alike: Alike, atoms: Atoms) -> Known:
    """Chunks of a stage run one after the other: the one with the highest counts, of equal ones the first."""
    sized = [_sized(use, alike.streams, atoms) for use in alike.uses]
    forms = [_forms(use, own, alike, atoms) for use, own in zip(alike.uses, sized, strict=True)]
    if len(sized) == 1:
        (own,) = sized
        return Known(forms[0], own.ends, np.zeros_like(own.numbers), own.numbers)
    passes = np.concatenate([np.repeat(np.arange(len(alike.passes)), np.diff(own.ends)) for own in sized])
    order = np.argsort(passes, kind="stable")
    chunks = np.repeat(np.arange(len(sized)), [len(own.numbers) for own in sized])
    numbers = np.concatenate([own.numbers for own in sized])
    ends = np.searchsorted(passes[order], np.arange(len(alike.passes) + 1))
    return Known(np.concatenate(forms)[order], ends, chunks[order], numbers[order])


def _components(use: Use, alike: Alike, which: int, moment: int, atoms: Atoms) -> Bytes:
    moments = use.course.moments(alike.streams)
    holdings = [*moments.candidates[moment].holdings, *use.others()]
    table: Bytes = use.course.components(atoms, holdings, layers(use.stage))
    items = [*use.items, alike.passes[which].workspace]
    for slot, count in enumerate(at_layers(moments.buffers[:, moment], layers(use.stage)).tolist()):
        item = items[slot]
        if count and item is not None:
            add_item(table, atoms, item, count)
    return table


def _forms(use: Use, sized: Sized, alike: Alike, atoms: Atoms) -> Bytes:
    """The moments of one chunk, with the engine's buffers and other micro-batches in flight. [moments, atoms]"""
    forms = at_layers(sized.forms, layers(use.stage))
    workspace = next((each.workspace for each in alike.passes if each.workspace is not None), None)
    if use.items or workspace is not None:
        forms += at_layers(sized.buffers, layers(use.stage)) @ _slots(
            use.items, workspace, sized.buffers.shape[2], atoms
        )
    return forms if max(flights(use.stage)) == 1 else forms + fitted(others(use, atoms).totals, len(atoms))


def _slots(items: tuple[Item, ...], workspace: Item | None, count: int, atoms: Atoms) -> Bytes:
    """The bytes of the engine's buffers, and of the workspace. [slots, atoms]"""
    key = ("slots", id(items), id(workspace), count)
    if key not in atoms.kept:
        sizes = np.zeros((count, len(atoms)))
        for slot, item in enumerate((*items, *(() if workspace is None else (workspace,)))):
            size, atom = atoms.of(item.block)
            sizes[slot, atom] = size
        atoms.kept[key] = (items, workspace), sizes
    found: Bytes = atoms.kept[key][1]
    return fitted(found, len(atoms))


def _sized(use: Use, streams: Streams, atoms: Atoms) -> Sized:
    """The moments of a course; `forms` are as wide as there are atoms."""
    key = ("sized", id(use.course), streams)
    if key not in atoms.kept:
        moments = use.course.moments(streams)
        numbers = np.array(sorted(number for family in moments.families for number in _highest_of(family, atoms)))
        forms = moments.counts[:, numbers] @ use.course.sizes(atoms)
        ends = np.searchsorted(numbers, moments.ends)
        atoms.kept[key] = use.course, Sized(forms, moments.buffers[:, numbers], numbers, ends)
    sized: Sized = atoms.kept[key][1]
    if sized.forms.shape[2] != len(atoms):
        sized = sized._replace(forms=fitted(sized.forms, len(atoms)))
        atoms.kept[key] = use.course, sized
    return sized


def _highest_of(family: Family, atoms: Atoms) -> list[int]:
    """The moments of a family that are its highest for some batch."""
    if len(family.moments) == 1:
        return family.moments
    if family.key not in atoms.kept:
        forms = family.counts @ atoms.sizes(family.program).rounded
        winners = (atoms.table.T @ forms.T).argmax(axis=1)  # the first of equal ones
        atoms.kept[family.key] = family, np.flatnonzero(np.bincount(winners)).tolist()
    return [family.moments[number] for number in atoms.kept[family.key][1]]


class Others(NamedTuple):
    """What other micro-batches in flight hold, whatever the moment is.

    Args:
        totals: their bytes. [atoms]
        components: the same by component. [components, atoms]
    """

    totals: Bytes
    components: Bytes


def others(use: Use, atoms: Atoms) -> Others:
    """Those of a chunk."""
    key = ("others", id(use.course), flights(use.stage), layers(use.stage))
    if key not in atoms.kept:
        components = use.course.components(atoms, use.others(), layers(use.stage))
        atoms.kept[key] = use.course, Others(components.sum(axis=0), components)
    found: Others = atoms.kept[key][1]
    return found


@lru_cache(maxsize=1024)
def _pass_of(masks: tuple[int, ...]) -> Numbers:
    """The number of the mask that each phase is in."""
    return np.array(
        [next((n for n, mask in enumerate(masks) if mask >> phase & 1), len(masks)) for phase in range(len(PHASES))]
    )
