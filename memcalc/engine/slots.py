"""Tensors that are no block's, the engine's buffers above all, as numbers times atoms."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.engine.atoms import Atoms, Bytes
from memcalc.engine.moments import NUMBER, ROUNDING
from memcalc.estimation.items import Item


class Slot(NamedTuple):
    """One tensor.

    Args:
        component: the number of its component.
        each: its bytes: a number and an atom.
        block: what the allocator hands out for it, likewise.
    """

    component: int
    each: tuple[float, int]
    block: tuple[float, int]

    def add_to(self, table: Bytes, count: float) -> None:
        """Add so many of them to a table by component. [components, atoms]"""
        (each, atom), (block, block_atom) = self.each, self.block
        table[self.component, atom] += count * each
        table[ROUNDING, block_atom] += count * block
        table[ROUNDING, atom] -= count * each


def slot_of(item: Item, atoms: Atoms) -> Slot:
    """An item's tensor.

    Raises:
        TooLarge: it is beyond what float64 holds exactly.
    """
    return Slot(NUMBER[item.component], atoms.of(item.each), atoms.of(item.block))
