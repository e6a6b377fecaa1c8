"""One pipeline stage over many batches: what `estimation.estimate` adds up row by row, as sums of atoms."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import ONE, Atoms, Bytes, fitted
from memcalc.engine.courses import (
    Surroundings,
    Use,
    counts_elements,
    course_of,
    flights,
    layers,
    stands_for,
    surroundings_of,
)
from memcalc.engine.moments import NUMBER, ROUNDING, Course
from memcalc.engine.moving import Alike, Moving, Others, others
from memcalc.engine.reading import Reader
from memcalc.engine.table import COMPONENTS
from memcalc.estimation.blocks.structure import Structure
from memcalc.estimation.communication import communication_buffers
from memcalc.estimation.engines.buffers import Around, Buffers
from memcalc.estimation.items import PHASES, Item
from memcalc.estimation.passes import Pass, beside, first_workspace, passes_of, pieces_of
from memcalc.estimation.sharding import stage_parameters
from memcalc.estimation.stages import Stage, one_in_flight
from memcalc.estimation.standing import standing_items
from memcalc.estimation.states import state_sums
from memcalc.spec.cards import Card
from memcalc.spec.spec import Spec

PHASE_NUMBER = {phase: number for number, phase in enumerate(PHASES)}

Passes = tuple[tuple[bool, tuple[Pass, ...]], ...]
Numbers = npt.NDArray[np.intp]


class Standing:
    """What stands through phases.

    Args:
        components: how often each phase has each atom, by component. [phases, components, atoms]
    """

    def __init__(self, components: Bytes) -> None:
        self.components = components
        self.totals: Bytes = components.sum(axis=1)  # [phases, atoms]


class StageForms(NamedTuple):
    """The bytes of one stage by phase and component, as sums of atoms."""

    number: int
    standing: Standing
    moving: Moving
    others: Others | None  # what other micro-batches in flight hold in phases in which something moves

    def components(self, atoms: Atoms, phase: int, moment: int) -> Bytes:
        """What is alive in a moment of a phase, by component: how often each has each atom. [components, atoms]"""
        still = fitted(self.standing.components[phase], len(atoms))
        moving = self.moving.components(atoms, phase, moment)
        if moving is None:
            return still
        found = still + fitted(moving, len(atoms))
        return found if self.others is None else found + fitted(self.others.components, len(atoms))


def stage_forms(
    reader: Reader, spec: Spec, structure: Structure, atoms: Atoms, stage: Stage, card: Card | None
) -> StageForms:
    """The forms of one stage.

    Args:
        reader: remembers what was found of other runs.
        spec: the run, with any of the batches.
        structure: its structure, the same object for runs of which it is the same.
        atoms: what sizes are made of.
        stage: the stage.
        card: the card.

    Raises:
        TooLarge: a size is beyond what float64 holds exactly.
        InputError: it is not modelled.
    """
    alone = _alone(stage)
    frame = reader.find(
        ("frame", alone, atoms), spec, partial(_frame, reader=reader, stage=alone, atoms=atoms, card=card)
    )
    chunks = pieces_of(spec, stage) if stage.pieces else (stage,)
    courses = _courses(reader, spec, structure, atoms, chunks, frame)
    if len(courses) == len(chunks) == 1:  # no moment is the highest because of other micro-batches
        (chunk,) = chunks
        waiting = others(Use(*courses[0].places[0], chunk), atoms) if max(flights(chunk)) > 1 else None
        chunks = (one_in_flight(chunk),)
    else:
        waiting = None
    key = ("moving", id(courses), *((flights(chunk), layers(chunk)) for chunk in chunks))
    if key not in atoms.kept:
        several = [
            Alike([Use(*place, chunk) for place, chunk in zip(each.places, chunks, strict=True)], each.passes)
            for each in courses
        ]
        atoms.kept[key] = courses, Moving(several, atoms)
    return StageForms(stage.index, frame.standing, atoms.kept[key][1], waiting)


@lru_cache(maxsize=4096)
def _alone(stage: Stage) -> Stage:
    """The stage without its micro-batches in flight: what stands there knows them as little as engines do."""
    return one_in_flight(stage)._replace(index=min(stage.index, 1), pieces=tuple(map(one_in_flight, stage.pieces)))


class _Frame(NamedTuple):
    """What is on a stage whatever its layers do: the engine's buffers around them, the passes, and what stands."""

    around: Around
    passes: Passes
    standing: Standing


def _frame(run: Spec, reader: Reader, stage: Stage, atoms: Atoms, card: Card | None) -> _Frame:
    buffers = communication_buffers(atoms.batches.on(run), stage)
    around = reader.same(_around_key(buffers.around), buffers.around)
    passes = tuple(passes_of(run, stage, card))
    return _Frame(around, reader.same(passes, passes), _standing(run, buffers, stage, atoms, card))


def _around_key(around: Around) -> object:
    """Equal for buffers that are alike; those with an array for each batch are like no others."""
    *places, shares, gathered = around
    several = [item for place in places for item in place]
    if any(isinstance(item.each, np.ndarray) for item in several):
        return id(around)
    return (*places, tuple(shares.items()), tuple(gathered.items()))


class _Courses(NamedTuple):
    """Passes before which gradients do, or do not, exist; of each chunk the course, and what its slots stand for."""

    passes: tuple[Pass, ...]
    places: list[tuple[Course, tuple[Item, ...]]]


def _courses(
    reader: Reader, spec: Spec, structure: Structure, atoms: Atoms, chunks: tuple[Stage, ...], frame: _Frame
) -> list[_Courses]:
    exactly = counts_elements(frame.around)
    wholes = tuple([stands_for(spec, chunk, exactly=exactly) for chunk in chunks])
    parameters = [stage_parameters(spec, whole) if exactly else None for whole in wholes]
    engine, recompute = spec.parallelism.engine, spec.training.recompute
    several: list[tuple[tuple[Pass, ...], Surroundings]] = []
    for exist, passes in frame.passes:
        place = ("surroundings", id(frame.around), exist, atoms)
        find = partial(_surroundings, around=frame.around, exist=exist, atoms=atoms)
        several.append((passes, reader.find(place, spec, find)))
    alike = tuple([(id(passes), id(surroundings)) for passes, surroundings in several])
    key = ("courses", spec.model, id(structure), engine, recompute, wholes, *parameters, alike)
    if key not in atoms.kept:
        found = []
        for passes, (gradients, pattern, items) in several:
            courses = [
                course_of(spec, structure, whole, gradients, pattern, own)
                for whole, own in zip(wholes, parameters, strict=True)
            ]
            for course in courses:
                for block in course.timeline.blocks:
                    atoms.learn(block.program)
            found.append(_Courses(passes, [(course, items) for course in courses]))
        atoms.kept[key] = found
    known: list[_Courses] = atoms.kept[key]
    return known


def _surroundings(run: Spec, around: Around, exist: bool, atoms: Atoms) -> Surroundings:
    found = surroundings_of(*beside(run, around, exist=exist))
    for item in found.items:  # their sizes can be told
        atoms.of(item.each)
        atoms.of(item.block)
    return found


def _standing(run: Spec, buffers: Buffers, stage: Stage, atoms: Atoms, card: Card | None) -> Standing:
    over = atoms.batches.on(run)
    standing = [*buffers.steady, *standing_items(over, stage, card), *first_workspace(run, stage, card)]
    return Standing(_still(run, stage, standing, atoms))


def _still(spec: Spec, stage: Stage, standing: list[Item], atoms: Atoms) -> Bytes:
    """What stands through phases, by component: how often each has each atom. [phases, components, atoms]"""
    parts = [(item, atoms.of(item.each), atoms.of(item.block)) for item in standing]
    table = np.zeros((len(PHASES), len(COMPONENTS), len(atoms)))
    table[:, :, ONE] = _states(spec, stage, atoms)
    for item, (each, atom), (block, block_atom) in parts:
        phases = _rows(item.mask)
        table[phases, NUMBER[item.component], atom] += item.count * each
        table[phases, ROUNDING, block_atom] += item.count * block
        table[phases, ROUNDING, atom] -= item.count * each
    return table


def _states(spec: Spec, stage: Stage, atoms: Atoms) -> Bytes:
    """Bytes of the model's states. [phases, components]"""
    sums = state_sums(spec, stage)
    key = ("states", id(sums))
    if key not in atoms.kept:
        table = np.zeros((len(PHASES), len(COMPONENTS)))
        for (phase, component), amount in sums.items():
            table[PHASE_NUMBER[phase], NUMBER[component]] = amount
        atoms.kept[key] = sums, table
    found: Bytes = atoms.kept[key][1]
    return found


@lru_cache(maxsize=1024)
def _rows(mask: int) -> Numbers | slice:
    """The phases of a mask, as neighbours where they are."""
    numbers = [number for number in range(len(PHASES)) if mask >> number & 1]
    if numbers and numbers[-1] - numbers[0] == len(numbers) - 1:
        return slice(numbers[0], numbers[-1] + 1)
    return np.array(numbers, dtype=np.intp)
