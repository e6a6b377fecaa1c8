"""One row of the ledger."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.ledger.component import Component


class Row(NamedTuple):
    """Identical tensors on one rank.

    `bytes` is the sum over all `count` tensors. `phases` are the phases with peaks at which the tensors are live.
    If the number of live tensors differs between phases, each number has a separate row.
    """

    component: Component
    module: str  # `layers.*` means all identical layers
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    count: int  # type: ignore[assignment] # hides tuple.count, which no row needs
    bytes: int
    phases: tuple[str, ...]
    formula: str  # of the bytes of one tensor, in symbols: "2·b·s·d"
    citation: str
