"""Copies of parameters: what for, in which dtype, from which ZeRO stage on sharded, and when; and one as an item."""

from __future__ import annotations

from enum import Enum, auto
from functools import lru_cache
from math import prod
from typing import NamedTuple

from memcalc.estimation.allocation import rounded
from memcalc.estimation.items import Item
from memcalc.estimation.parameters import Axis
from memcalc.estimation.sharding import Held, formula_of, shard_shape
from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES


class Spread(NamedTuple):
    """Over how many ranks a copy is spread: what routed experts hold, and all else; and the engine that cuts it."""

    ranks: int
    expert_ranks: int
    engine: str

    def over(self, held: Held) -> int:
        """The ranks that share one parameter."""
        if held.beside:
            return 1
        return self.expert_ranks if held.routed else self.ranks

    def shape(self, held: Held) -> tuple[int, ...]:
        """One rank's share of a parameter."""
        return _share(held.axes, self.over(held), self.engine)[0]

    def copy_shape(self, copy: Copy, held: Held) -> tuple[int, ...]:
        """One rank's share of a copy of it."""
        return _share(copy.axes(held), self.over(held), self.engine)[0]


UNSPREAD = Spread(1, 1, "")


class Role(Enum):
    """What a copy of the parameters is for."""

    WEIGHTS = auto()
    MASTER_WEIGHTS = auto()
    GRADIENTS = auto()  # as autograd makes them
    SUMMED_GRADIENTS = auto()  # of micro-batches
    MASTER_GRADIENTS = auto()  # that the optimizer reads beside master weights
    AVERAGE = auto()
    REFERENCE = auto()  # of a frozen copy of the model
    OTHER = auto()


class Copy(NamedTuple):
    """One copy of every parameter of a rank.

    Args:
        component: that its bytes count for.
        name: as it is shown behind the parameter's. Nothing is decided by it.
        dtype: its dtype.
        sharded_from_stage: the ZeRO stage from which on a rank has its share alone.
        mask: the phases in which it is alive.
        citation: its source.
        as_made: whether it is as large as autograd makes the gradient.
        role: what it is for.
    """

    component: Component
    name: str
    dtype: str
    sharded_from_stage: int
    mask: int
    citation: str
    as_made: bool = False
    role: Role = Role.OTHER

    def axes(self, held: Held) -> tuple[Axis, ...]:
        """The axes of this copy of a parameter, before it is shared."""
        return held.gradient if self.as_made and held.gradient else held.axes


def copy_item(copy: Copy, held: Held, spread: Spread) -> Item:
    """The copy of one parameter on one rank."""
    shape, elements, formula = _share(copy.axes(held), spread.over(held), spread.engine)
    item_bytes = DTYPE_BYTES[copy.dtype]
    each = item_bytes * elements
    return Item(
        copy.component,
        held.module,
        held.tensor + copy.name,
        shape,
        copy.dtype,
        held.count,
        each,
        rounded(each),
        copy.mask,
        f"{item_bytes}·{formula}",
        copy.citation,
    )


@lru_cache(maxsize=4096)
def _share(axes: tuple[Axis, ...], ranks: int, engine: str) -> tuple[tuple[int, ...], int, str]:
    """One rank's share of a parameter: its shape, its elements, and these in symbols."""
    shape = shard_shape(tuple(size for _, size in axes), ranks, engine)
    return shape, prod(shape), formula_of(axes) + ("/N" if ranks > 1 else "")
