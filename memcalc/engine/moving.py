"""What comes and goes on a stage: the moments of its phases that may be their highest, as sums of atoms.

They are put together for many stages at once: those that have a course in common differ in numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from memcalc.engine.atoms import Atoms, Bytes
from memcalc.engine.highest import ever_highest
from memcalc.engine.moments import Counts, Course, Family, Moments, Numbers, Streams, at_layers
from memcalc.engine.slots import Slot
from memcalc.estimation.program import Stream


@dataclass(frozen=True, eq=False, slots=True)
class Held:
    """What other micro-batches in flight hold on one chunk of a stage, whatever the moment is.

    Args:
        course: the chunk's.
        counts: how many tensors of each of its sizes, see `Course.found`.
        layers: how many the chunk has.
    """

    course: Course
    counts: Counts
    layers: int

    def components(self, atoms: Atoms) -> Bytes:
        """Their bytes by component. [components, atoms]"""
        return self.course.components(atoms, self.counts, self.layers)


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """One chunk of a stage in some of its passes.

    Args:
        course: the chunk's, with one micro-batch in flight.
        streams: the passes.
        slots: the engine's buffers and, behind them, the workspace of backward, if it makes one.
        layers: how many the chunk has.
        others: what other micro-batches hold of it, where that decides which chunk is highest.
    """

    course: Course
    streams: Streams
    slots: tuple[Slot, ...]
    layers: int
    others: Held | None

    def components(self, number: int, moment: int, atoms: Atoms) -> Bytes:
        """What is alive in one of the course's moments of a pass, by component: how often each has each atom."""
        stream, makes_workspace = self.streams[number]
        table = self.course.components(atoms, self.course.held(stream, moment), self.layers)
        counts = at_layers(self.course.moments(stream, makes_workspace).buffers[:, moment], self.layers)
        for slot in counts.nonzero()[0].tolist():
            self.slots[slot].add_to(table, float(counts[slot]))
        return table if self.others is None else table + self.others.components(atoms)


# One pass of a stage: the parts that run one after the other, each with the number of the pass in it.
Runs = tuple[tuple[Part, int], ...]


class Sized:
    """The moments of some passes of a course, without those that another one exceeds for all batches.

    Attributes:
        numbers: which of its pass's moments each is. [moments]
        counts: how many of them each pass has.
        forms: what blocks hold: how often it has each atom, however many layers there are, and for each layer.
            [2, moments, atoms]
        buffers: how many of each of the engine's buffers stand around it, and of the workspace, likewise.
            [2, moments, slots]
    """

    def __init__(self, course: Course, streams: Streams, atoms: Atoms, lanes: slice) -> None:
        passes = [course.moments(*each) for each in streams]
        found = [_kept(course, stream, atoms, lanes) for stream, _ in streams]
        self.numbers: Numbers = np.concatenate([numbers for numbers, _ in found])
        self.counts = [len(numbers) for numbers, _ in found]
        self.forms: Bytes = np.concatenate([forms for _, forms in found], axis=1)
        buffers = [moments.buffers[:, numbers] for moments, (numbers, _) in zip(passes, found, strict=True)]
        self.buffers: Counts = np.concatenate(buffers, axis=1)

    def of(self, parts: list[Part], atoms: Atoms) -> Bytes:
        """The same moments of several parts, those of one after those of another. [parts * moments, atoms]"""
        layers = np.array([part.layers for part in parts], dtype=float).reshape(-1, 1, 1)
        found: Bytes = self.forms[0] + layers * self.forms[1]
        slots = np.zeros((len(parts), self.buffers.shape[2], len(atoms)))
        for own, part in zip(slots, parts, strict=True):
            for row, slot in zip(own, part.slots, strict=False):
                row[slot.block[1]] = slot.block[0]
        if slots.any():
            found += (self.buffers[0] + layers * self.buffers[1]) @ slots
        for number, part in enumerate(parts):
            if part.others is not None:
                found[number] += part.others.components(atoms).sum(axis=0)
        return found.reshape(-1, len(atoms))


class Forms:
    """The moments of some passes.

    Args:
        passes: of which; chunks that run one after the other have the moments of all of them.
        atoms: what sizes are made of.
        lanes: the batches that they are for.

    Attributes:
        forms: the bytes of each moment, those of one pass after those of another. [moments, atoms]
        ends: where those of each pass begin, and where those of the last one end. [passes + 1]
    """

    def __init__(self, passes: Sequence[Runs], atoms: Atoms, lanes: slice) -> None:
        self._atoms = atoms
        groups: dict[tuple[Course, Streams], list[Part]] = {}
        for part in dict.fromkeys(part for runs in passes for part, _ in runs):
            groups.setdefault((part.course, part.streams), []).append(part)
        tables, sizes, numbers = [], [0], []
        first: dict[Part, int] = {}  # the number of its first pass, in the order of `tables`
        for (course, streams), own in groups.items():
            sized = _sized(course, streams, atoms, lanes)
            tables.append(sized.of(own, atoms))
            first |= {part: len(sizes) - 1 + number * len(streams) for number, part in enumerate(own)}
            sizes += sized.counts * len(own)
            numbers.append(np.tile(sized.numbers, len(own)))
        ends = np.cumsum(sizes)
        runs_of = [[(part, number, first[part] + number) for part, number in runs] for runs in passes]
        several = np.array([run for runs in runs_of for _, _, run in runs])
        starts, counts = ends[several], np.diff(ends)[several]
        self.ends: Numbers = np.concatenate([[0], np.cumsum(counts)[np.cumsum([*map(len, passes)]) - 1]])
        rows = np.arange(self.ends[-1]) + np.repeat(starts - np.cumsum(counts) + counts, counts)
        self.forms: Bytes = np.concatenate(tables)[rows]
        self._runs, self._moments, self._bounds = runs_of, np.concatenate(numbers), ends

    def components(self, number: int, moment: int) -> Bytes:
        """What is alive in one of the moments of a pass, by component: how often it has each atom."""
        for part, own, run in self._runs[number]:
            start, stop = self._bounds[run : run + 2].tolist()
            if moment < stop - start:
                return part.components(own, int(self._moments[start + moment]), self._atoms)
            moment -= stop - start
        raise IndexError(moment)


def _sized(course: Course, streams: Streams, atoms: Atoms, lanes: slice) -> Sized:
    key = ("sized", course, streams, len(atoms), lanes.start, lanes.stop)
    if key not in atoms.kept:
        atoms.kept[key] = Sized(course, streams, atoms, lanes)
    found: Sized = atoms.kept[key]
    return found


def _kept(course: Course, stream: Stream, atoms: Atoms, lanes: slice) -> tuple[Numbers, Bytes]:
    """The moments of a phase that are not always exceeded, and what blocks hold in them, see `Sized`."""
    key = ("forms", course, stream, len(atoms), lanes.start, lanes.stop)
    if key not in atoms.kept:
        moments = course.moments(stream, makes_workspace=False)
        numbers = np.sort(moments.order[_highest_of(moments, atoms, lanes)])
        atoms.kept[key] = numbers, moments.counts[:, numbers] @ course.sizes(atoms).rounded
    found: tuple[Numbers, Bytes] = atoms.kept[key]
    return found


def _highest_of(moments: Moments, atoms: Atoms, lanes: slice) -> Numbers:
    """The places in `Moments.order` of those that are their family's highest for some batch."""
    key = (moments.keys, lanes.start, lanes.stop)
    if key not in atoms.kept:
        several = [_highest_of_family(family, atoms, lanes) for family in moments.families]
        starts = accumulate((len(family.moments) for family in moments.families), initial=0)
        atoms.kept[key] = np.array([first + own for first, each in zip(starts, several, strict=False) for own in each])
    found: Numbers = atoms.kept[key]
    return found


def _highest_of_family(family: Family, atoms: Atoms, lanes: slice) -> list[int]:
    if len(family.moments) == 1:
        return [0]
    key = (family.key, lanes.start, lanes.stop)
    if key not in atoms.kept:
        forms = family.counts @ atoms.sizes(family.program).rounded
        alike = ("highest", forms.tobytes(), forms.shape, lanes.start, lanes.stop)  # other families may have the same
        if alike not in atoms.kept:
            atoms.kept[alike] = ever_highest(forms, atoms.table[:, lanes], atoms.never_zero(lanes))
        atoms.kept[key] = atoms.kept[alike]
    found: list[int] = atoms.kept[key]
    return found
