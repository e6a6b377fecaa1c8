"""The moments that may be the highest of a phase, as rows of counts: how many of each size are alive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import Atoms, Bytes
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
        program: the block's.
        counts: how many tensors of each of its sizes it holds in each. [moments, sizes]
        moments: their numbers, in order.
        key: equal for families of which the same ones are the highest.
    """

    program: Program
    counts: Counts
    moments: list[int]
    key: tuple[int, ...]


class Moments(NamedTuple):
    """The moments of some phases that may be their highest, those of one phase after those of another.

    Args:
        candidates: the moments.
        ends: where those of each phase begin, and where the last ones end. [phases + 1]
        counts: how many tensors of each size are alive, those of one block after those of another: however many layers
            there are, and for each layer. [2, moments, sizes]
        buffers: how many of each of the engine's buffers are around them, by slot, likewise. [2, moments, slots]
        families: all of them, once.
    """

    candidates: list[Candidate]
    ends: Numbers
    counts: Counts
    buffers: Counts
    families: list[Family]


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
        self._known: dict[Streams, Moments] = {}

    def moments(self, streams: Streams) -> Moments:
        """The moments of some phases."""
        if streams not in self._known:
            several = [
                list(self.timeline.candidates(stream, self._slots[-1] if makes_workspace else None))
                for stream, makes_workspace in streams
            ]
            candidates = [each for candidates in several for each in candidates]
            counts = self.counts(*(each.holdings for each in candidates))
            buffers = np.zeros((len(candidates), len(self._slots)))
            for number, each in enumerate(candidates):
                for item, count in each.engine:
                    buffers[number, self._numbers[id(item)]] += count
            ends = np.cumsum([0, *map(len, several)])
            families = self._families(candidates, np.repeat(np.arange(len(several)), np.diff(ends)).tolist())
            self._known[streams] = Moments(candidates, ends, counts, by_layer(buffers), families)
        return self._known[streams]

    def _families(self, candidates: list[Candidate], phases: list[int]) -> list[Family]:
        found: dict[object, list[int]] = {}
        for number, (phase, each) in enumerate(zip(phases, candidates, strict=True)):
            *around, (block, _, count) = each.holdings
            beside = [(index, id(storages), many) for index, storages, many in around]
            engine = [(id(item), many) for item, many in each.engine]
            found.setdefault((phase, block, count, *beside, *engine), []).append(number)
        families = []
        for numbers in found.values():
            block = candidates[numbers[0]].holdings[-1][0]
            storages = [candidates[number].holdings[-1][1] for number in numbers]
            program = self.timeline.blocks[block].program
            alive = np.array([alive_counts(program, each) for each in storages])
            families.append(Family(program, alive, numbers, (id(program), *map(id, storages))))
        return families

    def sizes(self, atoms: Atoms) -> Bytes:
        """What the allocator hands out for each size of each block, which were learnt. [sizes, atoms]"""
        programs = tuple([block.program for block in self.timeline.blocks])
        key = ("sizes", *map(id, programs))
        known = atoms.kept.get(key)
        if known is None or known[1].shape[1] != len(atoms):
            found = np.concatenate([atoms.sizes(program).rounded for program in programs])
            known = atoms.kept[key] = programs, found
        sizes: Bytes = known[1]
        return sizes

    def counts(self, *moments: Iterable[Holding]) -> Counts:
        """How many tensors of each size the blocks hold in some moments, as of `Moments`. [2, moments, sizes]"""
        programs = [block.program for block in self.timeline.blocks]
        ends = np.cumsum([0, *(len(program.kinds) for program in programs)]).tolist()
        held: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}  # moments hold the same tensors again and again
        for holdings in moments:
            for block, storages, _ in holdings:
                held[block, id(storages)] = block, storages
        sizes = np.zeros((len(held), ends[-1]))
        for row, (block, storages) in zip(sizes, held.values(), strict=True):
            row[ends[block] : ends[block + 1]] = alive_counts(programs[block], storages)
        column = {key: number for number, key in enumerate(held)}
        times = np.zeros((len(moments), len(held)))
        for number, holdings in enumerate(moments):
            for block, storages, count in holdings:
                times[number, column[block, id(storages)]] += count
        return by_layer(times) @ sizes

    def components(self, atoms: Atoms, holdings: Iterable[Holding], of_layers: int) -> Bytes:
        """What blocks hold, by component: how often each has each atom. [components, atoms]"""
        table = np.zeros((len(COMPONENTS), len(atoms)))
        for block, storages, count in holdings:
            each = round(count / MANY)
            table += (count - each * MANY + each * of_layers) * held_components(
                self.timeline.blocks[block].program, storages, atoms
            )
        return table


def by_layer(counts: Counts) -> Counts:
    """Counts on a stage of `MANY` layers: what is there however many layers there are, and for each layer. [2, ...]"""
    each = np.rint(counts / MANY)
    return np.stack([counts - MANY * each, each])


def at_layers(counts: Counts, many: int) -> Counts:
    """Counts on a stage of so many layers."""
    found: Counts = counts[0] + many * counts[1]
    return found


def add_item(table: Bytes, atoms: Atoms, item: Item, count: int) -> None:
    """Add so many of an item's tensors to a table by component. [components, atoms]"""
    each, atom = atoms.of(item.each)
    block, block_atom = atoms.of(item.block)
    table[NUMBER[item.component], atom] += count * each
    table[ROUNDING, block_atom] += count * block
    table[ROUNDING, atom] -= count * each


def alive_counts(program: Program, storages: tuple[int, ...]) -> Counts:
    """How many of some storages have each of the program's sizes. [sizes]"""
    found: dict[Any, Counts] = program.findings.setdefault("alive", {})
    if storages not in found:
        kinds = [program.kind_of[storage] for storage in storages]
        found[storages] = np.bincount(kinds, minlength=len(program.kinds)).astype(float)
    return found[storages]


def held_components(program: Program, storages: tuple[int, ...], atoms: Atoms) -> Bytes:
    """The bytes of some storages by component, their rounding among them. [components, atoms]"""
    key = ("components", id(program), id(storages))
    known = atoms.kept.get(key)
    if known is None or known[1].shape[1] != len(atoms):
        exact, blocks = atoms.sizes(program)
        counts = np.zeros((len(COMPONENTS), len(program.kinds)))
        for storage in storages:
            counts[NUMBER[program.labels[storage][0]], program.kind_of[storage]] += 1
        table = counts @ exact
        table[ROUNDING] += counts.sum(axis=0) @ (blocks - exact)
        known = atoms.kept[key] = (program, storages), table
    found: Bytes = known[1]
    return found
