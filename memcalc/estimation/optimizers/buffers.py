"""Temporaries of the optimizer step: their shapes and dtypes relative to a parameter, and their items."""

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

# parts of a model; some optimizers create the states of one part after those of another
PARTS = ("embedding", "layer", "head")
ALL = frozenset(PARTS)
BLOCK_4BIT = 128  # elements that share a scale: torchao 0.18 optim/adam.py


class Buffer(NamedTuple):
    """One temporary.

    Args:
        name: in rows.
        shape: that of the parameter ("whole"), short side x short side ("gram"), long side x rank ("low"), one number
            per row ("rows"), one number per block of 128 elements ("blocks"), or the staging buffer of a sum over the
            rows ("stage").
        dtype: a dtype, or "update" for the dtype of the updated tensors.
    """

    name: str
    shape: str = "whole"
    dtype: str = "update"


class Alive(NamedTuple):
    """A tensor live at the peak of the step, and its parameter; there is one per such parameter."""

    held: Held
    buffer: Buffer


class Moment(NamedTuple):
    """A point in the step.

    Args:
        alive: live tensors.
        made: parts of the model that have states by then, in the first step.
    """

    alive: list[Alive]
    made: frozenset[str] = ALL


def bytes_of(alive: Alive, update: Update, spread: Spread, card: Multiprocessors) -> int:
    """Return the bytes of all tensors of this type, rounded to allocator blocks."""
    item = item_of(alive, update, spread, card, 0, "")
    return item.block * item.count


def items_of(
    moment: Iterable[Alive], update: Update, spread: Spread, card: Multiprocessors, mask: int, citation: str
) -> list[Item]:
    """Return the items live at a point of the step."""
    return [item_of(alive, update, spread, card, mask, citation) for alive in moment]


def item_of(alive: Alive, update: Update, spread: Spread, card: Multiprocessors, mask: int, citation: str) -> Item:
    """Return one temporary of a parameter as an item."""
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
