"""What stands through the phases of a stage: model states above all, which do not depend on batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import ONE, Atoms, Bytes
from memcalc.engine.moments import NUMBER, ROUNDING
from memcalc.engine.slots import Slot
from memcalc.engine.table import COMPONENTS
from memcalc.estimation.items import PHASES, Item
from memcalc.estimation.stages import Stage
from memcalc.estimation.states import state_sums
from memcalc.spec.spec import Spec

PHASE_NUMBER = {phase: number for number, phase in enumerate(PHASES)}

Numbers = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False, slots=True)
class Varying:
    """Tensors whose sizes depend on batches: in which phases, how many of which. The same object where they are."""

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


@dataclass(frozen=True, eq=False, slots=True)
class Standing:
    """What stands through phases, the same object where it is.

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
        (each, atom), (block, block_atom) = slot = atoms.of(item.each), atoms.of(item.block)
        if atom == block_atom == ONE:
            phases = phases_of(item.mask)
            constant[phases, NUMBER[item.component]] += item.count * each
            constant[phases, ROUNDING] += item.count * (block - each)
        else:
            varying.append((item.mask, item.count, Slot(NUMBER[item.component], *slot)))
    tensors = tuple(varying)
    own: Varying = atoms.kept.setdefault(("varying", tensors), Varying(tensors))
    found: Standing = atoms.kept.setdefault(("standing", constant.tobytes(), own), Standing(constant, own))
    return found


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
