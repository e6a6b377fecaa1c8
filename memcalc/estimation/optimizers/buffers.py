"""Tensors that the optimizer step makes and drops: their shapes and dtypes beside a parameter, and their items."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from memcalc.estimation.allocation import blocks
from memcalc.estimation.copies import UNSPREAD, Copy, Spread, copy_item
from memcalc.estimation.items import Item
from memcalc.estimation.optimizers.update import Update
from memcalc.estimation.parameters import Axis
from memcalc.estimation.sharding import Held
from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.workspaces import most
from memcalc.workspaces.multiprocessors import Multiprocessors
from memcalc.workspaces.reductions import column_sum

# Parts of a model, whose states are made one after the other by some optimizers.
PARTS = ("embedding", "layer", "head")
ALL = frozenset(PARTS)
BLOCK_4BIT = 128  # elements that share a scale: torchao 0.18 optim/adam.py


class Buffer(NamedTuple):
    """One such tensor.

    Args:
        name: in rows.
        shape: of the parameter ("whole"), short side x short side ("gram"), long side x rank ("low"), a number for each
            row ("rows"), a number for each block of 128 elements ("blocks"), or the staging buffer of a sum over the
            rows ("stage").
        dtype: a dtype, or "update" for that of what is updated.
    """

    name: str
    shape: str = "whole"
    dtype: str = "update"


class Alive(NamedTuple):
    """A tensor that is alive in the highest moment, and the parameter that it belongs to; one for each such."""

    held: Held
    buffer: Buffer


class Moment(NamedTuple):
    """A moment of the step: what is alive, and of which parameters the states exist when the step is the first."""

    alive: list[Alive]
    made: frozenset[str] = ALL


def bytes_of(alive: Alive, update: Update, spread: Spread, card: Multiprocessors) -> int:
    """Bytes of all tensors of this kind, as the allocator hands them out."""
    item = item_of(alive, update, spread, card, 0, "")
    return item.block * item.count


def items_of(
    moment: Iterable[Alive], update: Update, spread: Spread, card: Multiprocessors, mask: int, citation: str
) -> list[Item]:
    """The items of a moment."""
    return [item_of(alive, update, spread, card, mask, citation) for alive in moment]


def item_of(alive: Alive, update: Update, spread: Spread, card: Multiprocessors, mask: int, citation: str) -> Item:
    """One of them."""
    held, buffer = alive
    dtype = update.dtype if buffer.dtype == "update" else buffer.dtype
    if buffer.shape == "rows":
        held, spread = held._replace(axes=held.axes[:-1]), UNSPREAD
    elif buffer.shape == "blocks":
        held, spread = held._replace(axes=(("n/128", prod(spread.shape(held)) // BLOCK_4BIT),)), UNSPREAD
    elif buffer.shape != "whole":
        short, long = sorted(held.axes, key=lambda axis: axis[1])
        axes: tuple[Axis, ...]
        if buffer.shape == "stage":
            size = most(blocks(column_sum(held.shape[-2], held.shape[-1], card)))
            axes = ((f"stage({held.formula})", size // DTYPE_BYTES[dtype]),)
        else:
            low = (long, ("r", min(update.rank, short[1])))
            axes = {"gram": (short, short), "low": low}[buffer.shape]
        held, spread = held._replace(axes=axes), UNSPREAD
    return copy_item(Copy(Component.TEMPORARIES, f" {buffer.name}", dtype, 1, mask, citation), held, spread)
