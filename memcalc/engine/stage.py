"""One pipeline stage over many batches: what `estimation.estimate` adds up row by row, as sums of atoms."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import ONE, Atoms, Bytes, fitted
from memcalc.engine.moments import NUMBER, ROUNDING, Course, Surroundings, Use, course_of, surroundings_of
from memcalc.engine.moving import Alike, Moving, phases_in
from memcalc.engine.reading import Reader
from memcalc.engine.table import COMPONENTS
from memcalc.estimation.communication import communication_buffers
from memcalc.estimation.engines.buffers import Around, Buffers
from memcalc.estimation.items import PHASES, Item
from memcalc.estimation.passes import Pass, beside, first_workspace, passes_of, pieces_of
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

    def moments(self, width: int) -> Bytes:
        """The bytes of each moment. [moments, atoms]"""
        standing, moving = self.standing, self.moving
        return fitted(standing.totals, width)[moving.phase] + fitted(moving.forms, width)

    def components(self, atoms: Atoms, moment: int) -> Bytes:
        """What is alive in one of the moments, by component: how often each has each atom. [components, atoms]"""
        still = fitted(self.standing.components[self.moving.phase[moment]], len(atoms))
        moving = self.moving.components(atoms, moment)
        return still if moving is None else still + fitted(moving, len(atoms))


def stage_forms(reader: Reader, spec: Spec, atoms: Atoms, stage: Stage, card: Card | None) -> StageForms:
    """The forms of one stage.

    Args:
        reader: remembers what was found of other runs.
        spec: the run, with any of the batches.
        atoms: what sizes are made of.
        stage: the stage.
        card: the card.

    Raises:
        TooLarge: a size is beyond what float64 holds exactly.
        InputError: it is not modelled.
    """

    def buffers_of(run: Spec) -> Buffers:
        found = communication_buffers(atoms.batches.on(run), stage)
        return found._replace(around=reader.same(_around_key(found.around), found.around))

    def passes(run: Spec) -> Passes:
        found = tuple(passes_of(run, stage, card))
        return reader.same(found, found)

    buffers = reader.find(("buffers", stage, atoms), spec, buffers_of)
    alike = reader.find(("passes", stage, atoms), spec, passes)
    standing = reader.find(
        ("standing", stage, atoms, id(buffers)), spec, lambda run: _standing(run, buffers, stage, atoms, card)
    )
    moving = reader.find(
        ("moving", stage, atoms, id(buffers.around), id(alike)),
        spec,
        lambda run: _moving(reader, run, buffers.around, alike, stage, atoms),
    )
    return StageForms(stage.index, standing, moving)


def _around_key(around: Around) -> object:
    """Equal for buffers that are alike; those with an array for each batch are like no others."""
    *places, shares, gathered = around
    several = [item for place in places for item in place]
    if any(isinstance(item.each, np.ndarray) for item in several):
        return id(around)
    return (*places, tuple(shares.items()), tuple(gathered.items()))


def _moving(reader: Reader, run: Spec, around: Around, alike: Passes, stage: Stage, atoms: Atoms) -> Moving:
    several: list[Alike] = []
    for exist, passes in alike:
        key = ("surroundings", id(around), exist, atoms)
        beside_it = reader.find(key, run, partial(_surroundings, around=around, exist=exist, atoms=atoms))
        gradients, pattern, items = beside_it
        uses = []
        for piece in pieces_of(run, stage):
            course_key = ("course", one_in_flight(piece), gradients, pattern, atoms)
            find = partial(_course, stage=piece, surroundings=beside_it, atoms=atoms)
            uses.append(Use(reader.find(course_key, run, find), items, piece))
        several.append(Alike(uses, passes))
    return Moving(several)


def _surroundings(run: Spec, around: Around, *, exist: bool, atoms: Atoms) -> Surroundings:
    found = surroundings_of(*beside(run, around, exist=exist))
    for item in found.items:  # their sizes can be told
        atoms.of(item.each)
        atoms.of(item.block)
    return found


def _course(run: Spec, stage: Stage, surroundings: Surroundings, atoms: Atoms) -> Course:
    found = course_of(run, stage, surroundings.gradients, surroundings.pattern)
    for block in found.timeline.blocks:
        atoms.learn(block.program)
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
    numbers = phases_in(mask)
    if numbers and numbers[-1] - numbers[0] == len(numbers) - 1:
        return slice(numbers[0], numbers[-1] + 1)
    return np.array(numbers, dtype=np.intp)
