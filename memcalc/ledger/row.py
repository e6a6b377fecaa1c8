"""One line of the ledger."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.ledger.component import Component


class Row(NamedTuple):
    """One kind of tensor on one rank.

    `bytes` is for all `count` of them together. `phases` are those at whose peak the tensors are alive;
    a tensor that is held in different numbers at different moments has a row for each number.
    """

    component: Component
    module: str  # `layers.*` stands for all layers that are alike
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    count: int  # type: ignore[assignment] # hides tuple.count, which no row needs
    bytes: int
    phases: tuple[str, ...]
    formula: str  # of one tensor's bytes, in symbols: "2·b·s·d"
    citation: str
