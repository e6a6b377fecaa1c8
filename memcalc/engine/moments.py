"""The moments that may be the highest of a phase, as rows of counts: how many of each size are alive."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import Atoms, Bytes, Sizes
from memcalc.engine.table import COMPONENTS
from memcalc.estimation.items import Item
from memcalc.estimation.moments import Candidate, Holding
from memcalc.estimation.program import Program, Stream
from memcalc.estimation.timeline import Timeline
from memcalc.ledger.component import Component

Counts = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.intp]

Streams = tuple[tuple[Stream, bool], ...]  # phases, and whether the first matrix product makes a workspace

# The layers of a stage that stands for all that have three or more: so many that in what is counted layers can be told
# from other things.
MANY = 2**20

NUMBER = {component: number for number, component in enumerate(COMPONENTS)}
ROUNDING = NUMBER[Component.BLOCK_ROUNDING]


class Family(NamedTuple):
    """Moments of a phase that differ in what one block holds, and in nothing else.

    Args:
        block: its number.
        program: the block's.
        counts: how many tensors of each of its sizes it holds in each. [moments, sizes]
        moments: their numbers, in order.
        key: the same for families of which the same ones are the highest.
    """

    block: int
    program: Program
    counts: Counts
    moments: list[int]
    key: object


class Moments(NamedTuple):
    """The moments of a phase that may be its highest.

    Args:
        candidates: the moments.
        counts: how many tensors of each size are alive, those of one block after those of another: however many layers
            there are, and for each layer. [2, moments, sizes]
        buffers: how many of each of the engine's buffers are around them, by slot, likewise. [2, moments, slots]
        families: all of them, once.
        keys: theirs: the same for moments of which the same ones are the highest.
        order: the moments of one family after those of another.
    """

    candidates: list[Candidate]
    counts: Counts
    buffers: Counts
    families: list[Family]
    keys: tuple[object, ...]
    order: Numbers


class Course:
    """The moments of one timeline, which runs may share whose buffers differ in their sizes alone.

    Args:
        timeline: with `slots` for buffers.
        slots: what stands for the engine's buffers; the last one is the workspace of backward.
    """

    def __init__(self, timeline: Timeline, slots: list[Item]) -> None:
        self.timeline = timeline
        self._numbers = {id(slot): number for number, slot in enumerate(slots)}
        self._slots = slots
        self._programs = tuple([block.program for block in timeline.blocks])
        # Where the sizes of each block begin, and where those of the last one end.
        self._ends = list(accumulate((len(program.kinds) for program in self._programs), initial=0))
        self._known: dict[tuple[Stream, bool], Moments] = {}
        self._held: dict[object, Counts] = {}

    def moments(self, stream: Stream, makes_workspace: bool) -> Moments:
        """The moments of a phase; `makes_workspace`: its first matrix product does."""
        key = (stream, makes_workspace)
        if key not in self._known:
            self._known[key] = self._with_workspace(stream) if makes_workspace else self._find(stream)
        return self._known[key]

    def _find(self, stream: Stream) -> Moments:
        candidates = list(self.timeline.candidates(stream))
        buffers = np.zeros((len(candidates), len(self._slots)))
        for number, each in enumerate(candidates):
            for item, count in each.engine:
                buffers[number, self._numbers[id(item)]] += count
        families = self._families(candidates)
        keys = tuple([family.key for family in families])
        order = np.array([number for family in families for number in family.moments])
        counts = by_layer(self._counts(candidates, families)[np.argsort(order)])
        return Moments(candidates, counts, by_layer(buffers), families, keys, order)

    def _with_workspace(self, stream: Stream) -> Moments:
        """The same moments; behind the first product stands its workspace."""
        moments = self.moments(stream, makes_workspace=False)
        buffers = moments.buffers.copy()
        buffers[0, :, -1] += [not each.before_product for each in moments.candidates]
        return moments._replace(buffers=buffers)

    def _families(self, candidates: list[Candidate]) -> list[Family]:
        found: dict[object, list[int]] = {}
        engines: dict[int, object] = {}  # by their ids: moments of one place have theirs in common
        for number, each in enumerate(candidates):
            *around, (block, _, count) = each.holdings
            if id(each.engine) not in engines:
                engines[id(each.engine)] = tuple([(id(item), many) for item, many in each.engine])
            place = (block, count, not each.before_product, engines[id(each.engine)])
            found.setdefault((*place, *map(id, around)), []).append(number)
        families = []
        for numbers in found.values():
            block = candidates[numbers[0]].holdings[-1][0]
            storages = [candidates[number].holdings[-1][1] for number in numbers]
            key, alive = _alive(self._programs[block], storages)
            families.append(Family(block, self._programs[block], alive, numbers, key))
        return families

    def _counts(self, candidates: list[Candidate], families: list[Family]) -> Counts:
        """How many tensors of each size the blocks hold in each moment, in the order of families. [moments, sizes]"""
        table = np.zeros((len(candidates), self._ends[-1]))
        first = 0
        for block, _, alive, numbers, _ in families:
            rows = table[first : first + len(numbers)]
            *around, (_, _, many) = candidates[numbers[0]].holdings
            for index, storages, count in around:
                rows[:, self._sizes_of(index)] += count * alive_counts(self._programs[index], storages)
            rows[:, self._sizes_of(block)] += many * alive
            first += len(numbers)
        return table

    def _sizes_of(self, block: int) -> slice:
        return slice(self._ends[block], self._ends[block + 1])

    def sizes(self, atoms: Atoms) -> Sizes:
        """Each size of each block, which were learnt, one block's after another's. [sizes, atoms]"""
        key = ("sizes", self._programs, len(atoms))
        if key not in atoms.kept:
            several = [atoms.sizes(program) for program in self._programs]
            atoms.kept[key] = Sizes._make(np.concatenate(each) for each in zip(*several, strict=True))
        sizes: Sizes = atoms.kept[key]
        return sizes

    def held(self, stream: Stream, moment: int) -> Counts:
        """What blocks hold in a moment of a phase, see `found`."""
        moments = self.moments(stream, makes_workspace=False)
        return self.found((stream, moment), lambda: moments.candidates[moment].holdings)

    def found(self, key: object, holdings: Callable[[], list[Holding]]) -> Counts:
        """How many tensors of each size blocks hold, by component, as of `Moments`. [2, components, sizes]

        Args:
            key: they are counted once for each.
            holdings: gives what blocks hold.
        """
        if key not in self._held:
            table = np.zeros((len(COMPONENTS), self._ends[-1]))
            for block, storages, count in holdings():
                table[:, self._sizes_of(block)] += count * component_counts(self._programs[block], storages)
            self._held[key] = by_layer(table)
        return self._held[key]

    def components(self, atoms: Atoms, held: Counts, layers: int) -> Bytes:
        """What that comes to on a stage of so many layers: how often each component has each atom. [components, atoms]

        Args:
            atoms: what sizes are made of.
            held: see `found`.
            layers: how many.
        """
        key = ("components", id(held), len(atoms))
        if key not in atoms.kept:
            exact, blocks = self.sizes(atoms)
            table: Bytes = held @ exact
            table[:, ROUNDING] += held.sum(axis=1) @ (blocks - exact)
            atoms.kept[key] = held, table
        return at_layers(atoms.kept[key][1], layers)


def by_layer(counts: Counts) -> Counts:
    """Counts on a stage of `MANY` layers: what is there however many layers there are, and for each layer. [2, ...]"""
    each = np.rint(counts / MANY)
    return np.stack([counts - MANY * each, each])


def at_layers(counts: Counts, many: int) -> Counts:
    """Counts on a stage of so many layers."""
    found: Counts = counts[0] + many * counts[1]
    return found


def _alive(program: Program, several: list[tuple[int, ...]]) -> tuple[object, Counts]:
    """How many of the storages of some moments have each of the program's sizes, and what is theirs alone."""
    found: dict[Any, tuple[object, Counts]] = program.findings.setdefault("families", {})
    key = tuple(several)
    if key not in found:
        found[key] = object(), np.array([alive_counts(program, each) for each in several])
    return found[key]


def alive_counts(program: Program, storages: tuple[int, ...]) -> Counts:
    """How many of some storages have each of the program's sizes. [sizes]"""
    found: dict[Any, Counts] = program.findings.setdefault("alive", {})
    if storages not in found:
        kinds = [program.kind_of[storage] for storage in storages]
        found[storages] = np.bincount(kinds, minlength=len(program.kinds)).astype(float)
    return found[storages]


def component_counts(program: Program, storages: tuple[int, ...]) -> Counts:
    """The same by component. [components, sizes]"""
    found: dict[Any, Counts] = program.findings.setdefault("components", {})
    if storages not in found:
        places = [NUMBER[program.labels[each][0]] * len(program.kinds) + program.kind_of[each] for each in storages]
        counts = np.bincount(places, minlength=len(COMPONENTS) * len(program.kinds)).astype(float)
        found[storages] = counts.reshape(len(COMPONENTS), -1)
    return found[storages]
