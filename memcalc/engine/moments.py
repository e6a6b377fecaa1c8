"""The moments that may be the highest of a phase, as rows of counts: how many of each size are alive.

`estimation.timeline` says which moments there are. With sizes at hand it looks at the one position of a block where
most is alive; here sizes are not known yet, so it is given every position that no other one contains.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import Atoms, Bytes
from memcalc.engine.table import COMPONENTS
from memcalc.estimation.blocks.catalogue import Gradients
from memcalc.estimation.blocks.structure import structure_of
from memcalc.estimation.engines.buffers import Around
from memcalc.estimation.items import Item
from memcalc.estimation.program import Program, Stream
from memcalc.estimation.stages import Kind, Stage, runs_of
from memcalc.estimation.timeline import BEFORE_FIRST_PRODUCT, Block, Candidate, Timeline
from memcalc.ledger.component import Component
from memcalc.spec.spec import Spec

Counts = npt.NDArray[np.float64]

NUMBER = {component: number for number, component in enumerate(COMPONENTS)}
ROUNDING = NUMBER[Component.BLOCK_ROUNDING]


class Unsized(Timeline):
    """A timeline whose sizes are not known, and not asked for."""

    def highest_positions(
        self, block: Block, stream: Stream, since: int = 0, among: frozenset[int] | None = None
    ) -> Iterable[int]:
        """Every position that may be the highest for some sizes."""
        return _tops(block.program, block.name, stream, since, among)

    def highest_layers(self, kind: Kind, stage: Stage) -> Iterable[int]:
        """Both ends of every run of such layers, between which the sum is linear."""
        return {layer for run in runs_of(self.spec, stage) if run[:2] == kind[:2] for layer in (run.first, run.last)}


class Phase(NamedTuple):
    """The moments of one phase that may be its highest, in order.

    Args:
        candidates: the moments.
        counts: how many tensors of each size are alive, those of one block after those of another. [moments, sizes]
        buffers: the engine's buffers around each, as numbers of slots, with their counts.
    """

    candidates: list[Candidate]
    counts: Counts
    buffers: list[tuple[tuple[int, int], ...]]


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
        self._phases: dict[tuple[Stream, bool], Phase] = {}

    def phase(self, stream: Stream, *, workspace: bool) -> Phase:
        """The moments of one phase; with a workspace that the first matrix product makes, or without."""
        key = (stream, workspace)
        if key not in self._phases:
            candidates = list(self.timeline.candidates(stream, self._slots[-1] if workspace else None))
            counts = self._held(candidates)
            buffers = [tuple((self._numbers[id(item)], n) for item, n in each.engine) for each in candidates]
            self._phases[key] = Phase(candidates, counts, buffers)
        return self._phases[key]

    def sizes(self, atoms: Atoms) -> Bytes:
        """What the allocator hands out for each size of each block. [sizes, atoms]"""
        for block in self.timeline.blocks:
            atoms.learn(block.program)
        return np.concatenate([atoms.sizes(block.program).rounded for block in self.timeline.blocks])

    def _held(self, candidates: list[Candidate]) -> Counts:
        """How many tensors of each size the blocks hold in some moments. [moments, sizes]"""
        programs = [block.program for block in self.timeline.blocks]
        ends = np.cumsum([0, *(len(program.kinds) for program in programs)]).tolist()
        columns = [slice(start, stop) for start, stop in pairwise(ends)]
        table = np.zeros((len(candidates), ends[-1]))
        for row, candidate in zip(table, candidates, strict=True):
            for block, storages, count in candidate.holdings:
                row[columns[block]] += count * alive_counts(programs[block], storages)
        return table

    def components(self, atoms: Atoms, candidate: Candidate) -> Bytes:
        """What the blocks hold in one moment, by component: how often each has each atom. [components, atoms]"""
        table = np.zeros((len(COMPONENTS), len(atoms)))
        for block, storages, count in candidate.holdings:
            program = self.timeline.blocks[block].program
            exact, blocks = atoms.sizes(program)
            counts = component_alive(program, storages)
            table += count * counts @ exact
            table[ROUNDING] += count * (counts.sum(axis=0) @ (blocks - exact))
        return table


MOST_COURSES = 4096  # that are kept

_COURSES: dict[object, Course] = {}


def course_of(spec: Spec, stage: Stage, gradients: Gradients, around: Around) -> tuple[Course, list[Item]]:
    """The course of a stage, or of one chunk of it; and the buffers that its slots stand for.

    Raises:
        InputError: the implementation is not modelled.
    """
    numbers: dict[int, int] = {}
    items: list[Item] = []

    def slot(item: Item) -> int:
        if id(item) not in numbers:
            numbers[id(item)] = len(items)
            items.append(item)
        return numbers[id(item)]

    *places, shares, gathered = around
    pattern = (
        tuple(tuple(slot(item) for item in place) for place in places),
        tuple((kind, slot(item)) for kind, item in shares.items()),
        tuple((kind, slot(item)) for kind, item in gathered.items()),
    )
    key = (spec.model, structure_of(spec), spec.training.recompute, spec.parallelism.engine, stage, gradients, pattern)
    if key not in _COURSES:
        while len(_COURSES) >= MOST_COURSES:
            del _COURSES[next(iter(_COURSES))]
        slots = [_slot(number) for number in range(len(items) + 1)]
        empty = Around._make(
            (
                *(tuple(slots[number] for number in place) for place in pattern[0]),
                {kind: slots[number] for kind, number in pattern[1]},
                {kind: slots[number] for kind, number in pattern[2]},
            )
        )
        _COURSES[key] = Course(Unsized(spec, stage, {}, gradients, empty), slots)
    return _COURSES[key], items


def _slot(number: int) -> Item:
    return Item(Component.COMMUNICATION_BUFFERS, "engine", f"slot {number}", (), "uint8", 1, 0, 0, 0, "", "")


def add_item(table: Bytes, atoms: Atoms, item: Item, count: int) -> None:
    """Add so many of an item's tensors to a table by component. [components, atoms]"""
    each, atom = atoms.of(item.each)
    block, block_atom = atoms.of(item.block)
    table[NUMBER[item.component], atom] += count * each
    table[ROUNDING, block_atom] += count * block
    table[ROUNDING, atom] -= count * each


def not_lower(forms: Bytes, low: Bytes, high: Bytes) -> list[int]:
    """The rows that may be the highest, the first of equal ones, where atoms range from `low` to `high`."""
    if len(forms) == 1:
        return [0]
    more = forms[:, None, :] - forms[None, :, :]
    least = np.maximum(more, 0) @ low + np.minimum(more, 0) @ high  # that the first is higher than the second
    earlier = np.tri(len(forms), k=-1, dtype=np.bool_).T
    lower = ((least > 0) | (earlier & (least >= 0))).any(axis=0)
    return [int(index) for index in np.flatnonzero(~lower)]


def not_contained(counts: Counts, never_zero: npt.NDArray[np.bool_]) -> list[int]:
    """The same where nothing is known of sizes, but that some are never zero."""
    contains = (counts[:, None, :] >= counts[None, :, :]).all(axis=2)
    higher = (counts[:, None, never_zero] > counts[None, :, never_zero]).any(axis=2)
    earlier = np.tri(len(counts), k=-1, dtype=np.bool_).T
    contained = (contains & (higher | earlier)).any(axis=0)
    return [int(index) for index in np.flatnonzero(~contained)]


# -- of programs, kept as long as these -------------------------------------------------------------------------------


class _Known(NamedTuple):
    tops: dict[tuple[bool, Stream, int, frozenset[int] | None], tuple[int, ...]]
    alive: dict[tuple[int, ...], Counts]
    components: dict[tuple[int, ...], Counts]


_KNOWN: WeakKeyDictionary[Program, _Known] = WeakKeyDictionary()


def _known(program: Program) -> _Known:
    found = _KNOWN.get(program)
    if found is None:
        found = _KNOWN[program] = _Known({}, {}, {})
    return found


def alive_counts(program: Program, storages: tuple[int, ...]) -> Counts:
    """How many of some storages have each of the program's sizes. [sizes]"""
    found = _known(program).alive
    if storages not in found:
        kinds = [program.kind_of[storage] for storage in storages]
        found[storages] = np.bincount(kinds, minlength=len(program.kinds)).astype(float)
    return found[storages]


def component_alive(program: Program, storages: tuple[int, ...]) -> Counts:
    """The same by component. [components, sizes]"""
    found = _known(program).components
    if storages not in found:
        counts = np.zeros((len(COMPONENTS), len(program.kinds)))
        for storage in storages:
            counts[NUMBER[program.labels[storage][0]], program.kind_of[storage]] += 1
        found[storages] = counts
    return found[storages]


def _tops(program: Program, block: str, stream: Stream, since: int, among: frozenset[int] | None) -> tuple[int, ...]:
    key = (block == "head", stream, since, among)
    found = _known(program).tops
    if key not in found:
        found[key] = _find_tops(program, block, stream, since, among)
    return found[key]


def _find_tops(
    program: Program, block: str, stream: Stream, since: int, among: frozenset[int] | None
) -> tuple[int, ...]:
    """The positions that no other one contains, among those at which something is made."""
    current = np.zeros(len(program.kinds))
    heights: list[Counts] = []
    positions: list[int] = []
    early: list[bool] = []  # the workspace of matrix products is not there yet
    for position, event in enumerate(program.stream(stream), 1):
        current[program.kind_of[event.storage]] += event.sign
        if (event.sign > 0 and position >= since) if among is None else position in among:
            heights.append(current.copy())
            positions.append(position)
            early.append(f"{block}: {event.label}" in BEFORE_FIRST_PRODUCT)
    tops: list[int] = []
    for state in (True, False):
        alike = [index for index, each in enumerate(early) if each is state]
        if alike:
            kept = not_contained(np.array([heights[index] for index in alike]), _never_zero(program))
            tops += [positions[alike[index]] for index in kept]
    return tuple(sorted(tops)) or (since,)


def _never_zero(program: Program) -> npt.NDArray[np.bool_]:
    """Of each of its sizes; a rule may give none, and a difference of axes may be none."""
    return np.array([kind.rule is None and not any("-" in axis for axis in kind.axes) for kind in program.kinds])
