"""What a program's own loop does with logits and gradients: arithmetic, defaults of frameworks, rules."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger

TOKENS, VOCAB, WIDTH = 2 * 512, 32768, 64
SIZES = (
    *("num_layers=2", f"hidden_size={WIDTH}", "num_attention_heads=4", "num_key_value_heads=4", "head_dim=16"),
    *("intermediate_size=128", f"vocab_size={VOCAB}", "b=2", "s=512", "optimizer=sgd"),
)
LOGITS = TOKENS * VOCAB


def run(*words: str) -> Ledger:
    return memcalc.estimate("llama-3.2-1b", *SIZES, *words).ledger


def of(ledger: Ledger, component: Component, phase: str) -> int:
    return sum(row.bytes for row in ledger.rows if row.component is component and phase in row.phases)


@pytest.mark.parametrize(
    ("words", "bytes_per_logit"),
    [
        # logits 2, log-probabilities 4, their gradient 4, that of the copy 4
        (("recipe=pure",), 14),
        # logits 2, log-probabilities 2, two gradients of 2
        (("recipe=pure", "loss_upcast=false"), 8),
        # logits 2, log-probabilities 4 from one kernel, their gradient 4, that of the logits 2
        (("recipe=amp", "loss_upcast=false"), 12),
        # logits 4, log-probabilities 4, two gradients of 4
        (("recipe=fp32",), 16),
        (("recipe=fp32", "loss_upcast=false"), 16),
        # logits that Fabric has converted 4, log-probabilities 4, two gradients of 4
        (("recipe=pure", "logits_dtype=fp32"), 16),
        (("recipe=pure", "logits_dtype=fp32", "implementation=huggingface"), 16),
    ],
)
def test_bytes_per_logit_at_the_peak(words: tuple[str, ...], bytes_per_logit: int) -> None:
    """Beside them only what is as small as the hidden states and the labels: under a twentieth of a byte per logit."""
    found = of(run(*words), Component.LOGITS_AND_LOSS, "backward_2")

    assert 0 <= found - bytes_per_logit * LOGITS < LOGITS // 20


def test_gradients_that_are_freed_before_backward_live_through_the_next_forward() -> None:
    """Those of the step before: 4 bytes per parameter in the second step's forward and loss, and not in backward."""
    before = {each: run("recipe=amp", f"zero_grad_before={each}") for each in ("forward", "backward")}
    layer = 4 * WIDTH**2 + 3 * WIDTH * 2 * WIDTH + 2 * WIDTH  # q, k, v, o; gate, up, down; two norms
    gradients = 4 * (2 * layer + VOCAB * WIDTH + WIDTH)

    for phase in ("forward_2", "loss_2"):
        assert of(before["forward"], Component.GRADIENTS, phase) == 0
        assert of(before["backward"], Component.GRADIENTS, phase) == gradients
    assert before["forward"].totals["backward_2"] == before["backward"].totals["backward_2"]
    for phase in ("forward_1", "loss_1", "backward_1"):
        assert before["forward"].totals[phase] == before["backward"].totals[phase]


@pytest.mark.parametrize(
    ("framework", "loop"),
    [
        ("lightning", ("loss", "backward", True)),
        ("loop", ("backward", "forward", False)),
        ("accelerate", ("backward", "forward", True)),
    ],
)
def test_frameworks_have_their_loops(framework: str, loop: tuple[str, str, bool]) -> None:
    training = memcalc.load("llama-3.2-1b", f"framework={framework}").training

    assert (training.logits_until, training.zero_grad_before, training.loss_upcast) == loop


def test_a_loop_around_transformers_has_its_loss() -> None:
    assert memcalc.load("llama-3.2-1b", "framework=loop", "implementation=huggingface").training.loss_upcast


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("loss_upcast=false", "implementation=huggingface"),
            (
                "loss_upcast = false with implementation huggingface and loss materialized, which makes the copy. "
                "Set loss_upcast: true, or implementation: plain and loss: materialized."
            ),
        ),
        (
            ("logits_dtype=fp32", "loss=chunked"),
            (
                "logits_dtype = fp32 with implementation plain and loss chunked: the model returns no logits to convert. "
                "Set logits_dtype: compute."
            ),
        ),
    ],
)
def test_losses_without_such_logits_are_named(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as raised:
        memcalc.load("llama-3.2-1b", *words)

    assert message in str(raised.value)
