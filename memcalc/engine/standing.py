"""What stands through the phases of a stage: model states above all, which do not depend on batches."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import ONE, Atoms, Bytes
from memcalc.engine.moments import NUMBER
from memcalc.engine.slots import Slot, slot_of
from memcalc.engine.table import COMPONENTS
from memcalc.estimation.items import PHASES, Item
from memcalc.estimation.stages import Stage
from memcalc.estimation.states import state_sums
from memcalc.spec.spec import Spec

PHASE_NUMBER = {phase: number for number, phase in enumerate(PHASES)}

Numbers = npt.NDArray[np.intp]


class Varying(NamedTuple):
    """Tensors whose sizes depend on batches: in which phases, how many of which. Few runs differ in them."""

    tensors: tuple[tuple[int, int, Slot], ...]

    def components(self, phase: int, width: int) -> Bytes:
        """What stands in a phase: how often each component has each of so many atoms. [components, atoms]"""
        table = np.zeros((len(COMPONENTS), width))
        for mask, count, slot in self.tensors:
            if mask >> phase & 1:
                slot.add_to(table, count)
        return table

    def totals(self, table: Bytes) -> Bytes:
        """Their bytes. [phases, n]"""
        found = np.zeros((len(PHASES), table.shape[1]))
        for mask, count, slot in self.tensors:
            size, atom = slot.block
            found[phases_of(mask)] += count * size * table[atom]
        return found


class Standing(NamedTuple):
    """What stands through phases.

    Args:
        constant: bytes that are the same for all batches. [phases, components]
        varying: the rest.
    """

    constant: Bytes
    varying: Varying


def standing_of(spec: Spec, stage: Stage, items: list[Item], atoms: Atoms) -> Standing:
    """Model states and what else stands on a stage.

    Raises:
        TooLarge: a size is beyond what float64 holds exactly.
    """
    constant = _states(spec, stage, atoms).copy()
    varying = []
    for item in items:
        slot = slot_of(item, atoms)
        if slot.each[1] == slot.block[1] == ONE:
            own = np.zeros((len(COMPONENTS), 1))
            slot.add_to(own, item.count)
            constant[phases_of(item.mask)] += own[:, 0]
        else:
            varying.append((item.mask, item.count, slot))
    return Standing(constant, Varying(tuple(varying)))


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
def phases_of(mask: int) -> Numbers | slice:
    """The phases of a mask, as neighbours where they are."""
    numbers = [number for number in range(len(PHASES)) if mask >> number & 1]
    if numbers and numbers[-1] - numbers[0] == len(numbers) - 1:
        return slice(numbers[0], numbers[-1] + 1)
    return np.array(numbers, dtype=np.intp)
