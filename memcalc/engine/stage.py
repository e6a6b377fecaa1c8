"""One pipeline stage over many batches: what `estimation.estimate` adds up row by row, added up by component."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import LARGEST, ONE, Atoms, Bytes, TooLarge
from memcalc.engine.moments import NUMBER, ROUNDING, course_of
from memcalc.engine.table import COMPONENTS
from memcalc.engine.tops import Asked, Top, fitted, highest
from memcalc.estimation.communication import communication_buffers
from memcalc.estimation.items import PHASES, Item
from memcalc.estimation.passes import beside, first_workspace, passes_of, pieces_of
from memcalc.estimation.stages import Stage
from memcalc.estimation.standing import standing_items
from memcalc.estimation.states import state_sums
from memcalc.spec.cards import Card
from memcalc.spec.spec import Spec

PHASE_NUMBER = {phase: number for number, phase in enumerate(PHASES)}

Numbers = npt.NDArray[np.intp]


class StageTotals:
    """The bytes of one stage by phase; by component for those who ask.

    Args:
        spec: the run, with any of the batches.
        over: the same with arrays of all of them.
        atoms: what sizes are made of.
        stage: the stage.
        card: the card.

    Raises:
        TooLarge: a size or a sum is beyond what float64 holds exactly.
    """

    def __init__(self, spec: Spec, over: Spec, atoms: Atoms, stage: Stage, card: Card | None) -> None:
        self._atoms = atoms
        buffers = communication_buffers(over, stage)
        standing = [*buffers.steady, *standing_items(over, stage, card), *first_workspace(spec, stage, card)]
        asked: list[tuple[Asked, int]] = []
        for exist, passes in passes_of(spec, stage, card):
            surroundings = beside(over, buffers.around, exist=exist)
            courses = [course_of(spec, piece, *surroundings) for piece in pieces_of(spec, stage)]
            asked += [(Asked(courses, each.stream, each.workspace), each.mask) for each in passes]
        self._tops: list[Top | None] = [None] * len(PHASES)
        tops = highest([each for each, _ in asked], atoms)
        self._still = _still(spec, stage, standing, atoms)
        self.totals = self._still.sum(axis=1) @ atoms.table
        for top, (_, mask) in zip(tops, asked, strict=True):
            for phase in phases_in(mask):
                self._tops[phase] = top
                self.totals[phase] += top.bytes
        self.peak = self.totals.max(axis=0)
        if self.peak.max() > LARGEST:
            raise TooLarge

    def components(self, phase: int, lanes: Numbers) -> Bytes:
        """Bytes by component in the highest moment of a phase, for some configurations. [components, lanes]"""
        still, top = self._still[phase], self._tops[phase]
        found: Bytes
        if top is None:
            found = still @ self._atoms.table[: still.shape[1], lanes]
            return found
        alone = top.winner
        if isinstance(alone, int):
            table = _sum(still, top.components(self._atoms, alone))
            found = table @ self._atoms.table[: table.shape[1], lanes]
            return found
        found = np.empty((len(COMPONENTS), len(lanes)))
        winner = alone[lanes]
        for number in np.flatnonzero(np.bincount(winner)).tolist():
            chosen = np.flatnonzero(winner == number)
            table = _sum(still, top.components(self._atoms, number))
            found[:, chosen] = table @ self._atoms.table[: table.shape[1], lanes[chosen]]
        return found


def _sum(one: Bytes, two: Bytes) -> Bytes:
    width = max(one.shape[1], two.shape[1])
    return fitted(one, width) + fitted(two, width)


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


@lru_cache(maxsize=1024)
def phases_in(mask: int) -> tuple[int, ...]:
    """The numbers of the phases of a mask."""
    return tuple(number for number in range(len(PHASES)) if mask >> number & 1)
