"""One pipeline stage over many batches: what `estimation.estimate` adds up row by row, added up by component."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import LARGEST, ONE, Atoms, Batches, Bytes, TooLarge
from memcalc.engine.moments import NUMBER, add_item, course_of
from memcalc.engine.table import COMPONENTS
from memcalc.engine.tops import Top, fitted, highest
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
        batches: all of them.
        atoms: what sizes are made of.
        stage: the stage.
        card: the card.

    Raises:
        TooLarge: a size or a sum is beyond what float64 holds exactly.
    """

    def __init__(self, spec: Spec, batches: Batches, atoms: Atoms, stage: Stage, card: Card | None) -> None:
        self._atoms = atoms
        over = batches.on(spec)
        buffers = communication_buffers(over, stage)
        standing = [*buffers.steady, *standing_items(over, stage, card), *first_workspace(spec, stage, card)]
        self._tops: list[Top | None] = [None] * len(PHASES)
        for exist, passes in passes_of(spec, stage, card):
            surroundings = beside(over, buffers.around, exist=exist)
            courses = [course_of(spec, piece, *surroundings) for piece in pieces_of(spec, stage)]
            for each in passes:
                top = highest(courses, each.stream, each.workspace, atoms)
                for phase in phases_in(each.mask):
                    self._tops[phase] = top
        self._still = _still(spec, stage, standing, atoms)
        self.totals = self._still.sum(axis=1) @ atoms.table
        for phase, found in enumerate(self._tops):
            if found is not None:
                self.totals[phase] += found.bytes
        self.peak = self.totals[0].copy()
        for row in self.totals[1:]:
            np.maximum(self.peak, row, out=self.peak)
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
    for item in standing:
        atoms.of(item.each)
        atoms.of(item.block)
    table = np.zeros((len(PHASES), len(COMPONENTS), len(atoms)))
    for (phase, component), amount in state_sums(spec, stage).items():
        table[PHASE_NUMBER[phase], NUMBER[component], ONE] = amount
    for item in standing:
        for number in phases_in(item.mask):
            add_item(table[number], atoms, item, item.count)
    return table


def phases_in(mask: int) -> Iterator[int]:
    """The numbers of the phases of a mask."""
    return (number for number in range(len(PHASES)) if mask >> number & 1)
