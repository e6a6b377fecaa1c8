"""FSDP2 pads the first axis of every parameter to a multiple of the ranks, and gathers the padding, too."""

from __future__ import annotations

import memcalc
from memcalc.ledger.component import Component

RUN = ("mixtral-8x7b", "num_layers=3", "b=1", "s=64", "recipe=pure", "engine=fsdp2", "zero_stage=3")
EXPERTS = 8 * 3 * 14336 * 4096  # of one layer: 8 experts, gate, up and down
OTHERS = (6144 + 4096 + 8 + 2) * 4096  # qkv, output, router and two norms: their rows divide by 8


def gathered(ranks: int, *overrides: str) -> int:
    ledger = memcalc.estimate(*RUN, f"data_parallel={ranks}", *overrides).ledger
    (row,) = (row for row in ledger.rows if row.tensor == "layer parameters, gathered" and "backward_2" in row.phases)
    return row.bytes


def test_fewer_experts_than_ranks() -> None:
    """A row each for 8 of 64 ranks, and room for one for every other: eight times the experts, and the router's 8 rows."""
    assert gathered(8) == 2 * (EXPERTS + OTHERS)
    assert gathered(64) == 2 * (8 * EXPERTS + OTHERS + 7 * 8 * 4096)


def test_rows_that_do_not_divide() -> None:
    """GPT-2's table has 50257 rows: 8 ranks hold 6283 each, 50264 in all."""
    run = ("gpt2", "b=1", "s=64", "recipe=pure", "engine=fsdp2", "zero_stage=3", "data_parallel=8")
    rows = memcalc.estimate(*run).ledger.rows
    (root,) = {row.bytes for row in rows if row.tensor == "root parameters, gathered"}

    assert root == 2 * 768 * (8 * 6283 + 1024 + 2)  # with 1024 positions, and the last norm's weight and bias
    assert not any(row.component is Component.MASTER_WEIGHTS for row in rows)
