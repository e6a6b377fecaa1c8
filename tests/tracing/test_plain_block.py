"""A layer of GPT-3, traced: the paper's 34bsd + 5bs²h bytes, plus the norms' statistics that it leaves out."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.ledger.component import Component

B, S, D, H = 1, 2048, 12288, 96
PAPER = 34 * B * S * D + 5 * B * S**2 * H
STATISTICS = 2 * 2 * B * S  # two norms, a mean and a reciprocal deviation a token


@pytest.mark.parametrize(
    ("semantics", "item", "expected"),
    [("cpu", 2, 2_868_920_320), ("cuda", 4, 2_868_936_704)],
    ids=["cpu keeps statistics in bf16", "cuda in fp32"],
)
def test_a_layer_of_gpt3(semantics: str, item: int, expected: int) -> None:
    """What a second layer adds to the activations at the loss."""
    one, two = (
        memcalc.trace("gpt3", f"l={layers}", "recipe=pure", semantics=semantics, steps=1).result.ledger
        for layers in (1, 2)
    )
    layer = two.components("loss_1")[Component.ACTIVATIONS] - one.components("loss_1")[Component.ACTIVATIONS]

    assert PAPER == 2_868_903_936
    assert layer == PAPER + item * STATISTICS == expected
