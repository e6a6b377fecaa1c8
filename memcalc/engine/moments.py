"""The moments that may be the highest of a phase, as rows of counts: how many of each size are alive.

`estimation.timeline` says which moments there are. With sizes at hand it looks at the one position of a block where
most is alive; here sizes are not known yet, so it is given every position that no other one contains.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import Atoms, Bytes
from memcalc.engine.table import COMPONENTS
from memcalc.estimation.blocks.catalogue import Gradients
from memcalc.estimation.blocks.structure import structure_of
from memcalc.estimation.engines.buffers import Around
from memcalc.estimation.items import Item
from memcalc.estimation.moments import Block, Candidate, Holding, others_of
from memcalc.estimation.passes import Pass
from memcalc.estimation.program import Program, Stream
from memcalc.estimation.stages import Kind, Stage, composition, one_in_flight, runs_of
from memcalc.estimation.timeline import BEFORE_FIRST_PRODUCT, Timeline
from memcalc.ledger.component import Component
from memcalc.spec.spec import Spec

# Of each place of `Around` the slots of its buffers, then those of its two mappings.
Pattern = tuple[tuple[tuple[int, ...], ...], tuple[tuple[bool, int], ...], tuple[tuple[bool, int], ...]]

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
        buffers: how many of each of the engine's buffers are around them, by slot. [moments, slots]
        groups: the numbers of the moments that have the same buffers.
    """

    candidates: list[Candidate]
    counts: Counts
    buffers: Counts
    groups: list[npt.NDArray[np.intp]]


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

    def phase_of(self, which: Pass) -> Phase:
        """The moments of one pass."""
        key = (which.stream, which.workspace is not None)
        if key not in self._phases:
            workspace = None if which.workspace is None else self._slots[-1]
            candidates = list(self.timeline.candidates(which.stream, workspace))
            counts = self.counts(*(each.holdings for each in candidates))
            buffers = np.zeros((len(candidates), len(self._slots)))
            alike: dict[bytes, list[int]] = {}
            for number, each in enumerate(candidates):
                for item, count in each.engine:
                    buffers[number, self._numbers[id(item)]] += count
                alike.setdefault(buffers[number].tobytes(), []).append(number)
            groups = [np.array(several) for several in alike.values()]
            self._phases[key] = Phase(candidates, counts, buffers, groups)
        return self._phases[key]

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
        """How many tensors of each size the blocks hold in some moments. [moments, sizes]"""
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
        return times @ sizes

    def components(self, atoms: Atoms, holdings: Iterable[Holding]) -> Bytes:
        """What blocks hold, by component: how often each has each atom. [components, atoms]"""
        table = np.zeros((len(COMPONENTS), len(atoms)))
        for block, storages, count in holdings:
            program = self.timeline.blocks[block].program
            exact, blocks = atoms.sizes(program)
            counts = component_alive(program, storages)
            table += count * counts @ exact
            table[ROUNDING] += count * (counts.sum(axis=0) @ (blocks - exact))
        return table


MOST_COURSES = 4096  # that are kept

_COURSES: dict[object, Course] = {}


class Surroundings(NamedTuple):
    """What becomes of gradients on arrival, and the engine's buffers around the layers.

    Args:
        gradients: on arrival.
        pattern: where there are buffers, as numbers of slots.
        items: the buffer of each slot.
    """

    gradients: Gradients
    pattern: Pattern
    items: tuple[Item, ...]


def surroundings_of(gradients: Gradients, around: Around) -> Surroundings:
    """Buffers, told apart from where they are."""
    numbers: dict[int, int] = {}
    items: list[Item] = []

    def slot(item: Item) -> int:
        if id(item) not in numbers:
            numbers[id(item)] = len(items)
            items.append(item)
        return numbers[id(item)]

    *places, shares, gathered = around
    pattern = (
        tuple([tuple([slot(item) for item in place]) for place in places]),
        tuple([(kind, slot(item)) for kind, item in shares.items()]),
        tuple([(kind, slot(item)) for kind, item in gathered.items()]),
    )
    return Surroundings(gradients, pattern, tuple(items))


class Use(NamedTuple):
    """A course as one chunk of a run has it.

    Args:
        course: of one micro-batch.
        items: what its slots stand for.
        stage: the chunk, with its micro-batches in flight.
    """

    course: Course
    items: tuple[Item, ...]
    stage: Stage

    @property
    def flights(self) -> tuple[int, ...]:
        """How many micro-batches are in flight: of layers, of the embedding, of the head, and behind the head."""
        return self.stage.in_flight, self.stage.embeddings, self.stage.heads, self.stage.waiting

    def others(self) -> list[Holding]:
        """What the other micro-batches in flight hold, whatever the moment is."""
        timeline = self.course.timeline
        return [
            (number, storages, count)
            for number, block in enumerate(timeline.blocks)
            for storages, count in others_of(self.stage, block.name, block.program, block.kind, timeline.tables)
        ]


def course_of(spec: Spec, stage: Stage, gradients: Gradients, pattern: Pattern) -> Course:
    """The course of a stage, or of one chunk of it.

    Raises:
        InputError: the implementation is not modelled.
    """
    alone = _alone(spec, stage)
    key = (spec.model, structure_of(spec), spec.training.recompute, spec.parallelism.engine, alone, gradients, pattern)
    if key not in _COURSES:
        while len(_COURSES) >= MOST_COURSES:
            del _COURSES[next(iter(_COURSES))]
        places, shares, gathered = pattern
        used = [number for place in places for number in place] + [number for _, number in (*shares, *gathered)]
        slots = [_slot(number) for number in range(max(used, default=-1) + 2)]
        empty = Around._make(
            (
                *(tuple(slots[number] for number in place) for place in places),
                {kind: slots[number] for kind, number in shares},
                {kind: slots[number] for kind, number in gathered},
            )
        )
        _COURSES[key] = Course(Unsized(spec, alone, {}, gradients, empty), slots)
    return _COURSES[key]


def _alone(spec: Spec, stage: Stage) -> Stage:
    """The stage with one micro-batch in flight; at the beginning of the model, where it does not matter where it is."""
    alike = composition(spec, stage)
    first = 0 if alike == (stage.stop - stage.first, stage.has_embedding, stage.has_head) else stage.first
    stop = stage.stop - stage.first + first
    return one_in_flight(stage)._replace(first=first, stop=stop, pieces=())


def _slot(number: int) -> Item:
    return Item(Component.COMMUNICATION_BUFFERS, "engine", f"slot {number}", (), "uint8", 1, 0, 0, 0, "", "")


def add_item(table: Bytes, atoms: Atoms, item: Item, count: int) -> None:
    """Add so many of an item's tensors to a table by component. [components, atoms]"""
    each, atom = atoms.of(item.each)
    block, block_atom = atoms.of(item.block)
    table[NUMBER[item.component], atom] += count * each
    table[ROUNDING, block_atom] += count * block
    table[ROUNDING, atom] -= count * each


def not_contained(counts: Counts, never_zero: npt.NDArray[np.bool_]) -> list[int]:
    """The same where nothing is known of sizes, but that some are never zero."""
    contains = (counts[:, None, :] >= counts[None, :, :]).all(axis=2)
    higher = (counts[:, None, never_zero] > counts[None, :, never_zero]).any(axis=2)
    earlier = np.tri(len(counts), k=-1, dtype=np.bool_).T
    contained = (contains & (higher | earlier)).any(axis=0)
    return [int(index) for index in np.flatnonzero(~contained)]


# -- of programs, kept as long as these -------------------------------------------------------------------------------


def _kept(program: Program, what: str) -> dict[Any, Any]:
    kept: dict[Any, Any] = program.findings.setdefault(what, {})
    return kept


def alive_counts(program: Program, storages: tuple[int, ...]) -> Counts:
    """How many of some storages have each of the program's sizes. [sizes]"""
    found = _kept(program, "alive")
    if storages not in found:
        kinds = [program.kind_of[storage] for storage in storages]
        found[storages] = np.bincount(kinds, minlength=len(program.kinds)).astype(float)
    counts: Counts = found[storages]
    return counts


def component_alive(program: Program, storages: tuple[int, ...]) -> Counts:
    """The same by component. [components, sizes]"""
    found = _kept(program, "components")
    if storages not in found:
        counts = np.zeros((len(COMPONENTS), len(program.kinds)))
        for storage in storages:
            counts[NUMBER[program.labels[storage][0]], program.kind_of[storage]] += 1
        found[storages] = counts
    known: Counts = found[storages]
    return known


def _tops(program: Program, block: str, stream: Stream, since: int, among: frozenset[int] | None) -> tuple[int, ...]:
    key = (block == "head", stream, since, among)
    found = _kept(program, "tops")
    if key not in found:
        found[key] = _find_tops(program, block, stream, since, among)
    positions: tuple[int, ...] = found[key]
    return positions


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
