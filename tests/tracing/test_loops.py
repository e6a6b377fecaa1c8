"""A loop's logits and gradients by PyTorch itself, on fake tensors, against the estimate."""

from __future__ import annotations

import pytest

import memcalc

SIZES = (
    *("llama-3.2-1b", "num_layers=2", "hidden_size=256", "num_attention_heads=8", "num_key_value_heads=8"),
    *("head_dim=32", "intermediate_size=1024", "vocab_size=16384", "b=2", "s=64"),
)
LONG = pytest.mark.long


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=pure", "loss_upcast=false", "zero_grad_before=backward"),
        ("recipe=pure", "autocast=true"),
        ("recipe=pure", "autocast=true", "weight_dtype=fp16"),
        (
            *("recipe=pure", "autocast=true", "implementation=huggingface"),
            "fp32_modules=[embed_tokens, lm_head, norm]",
        ),
        pytest.param(("recipe=pure", "autocast=true", "implementation=huggingface"), marks=LONG),
        pytest.param(("recipe=pure", "logits_dtype=fp32"), marks=LONG),
        pytest.param(("recipe=pure", "logits_dtype=fp32", "implementation=huggingface"), marks=LONG),
        pytest.param(("recipe=amp", "zero_grad_before=backward", "gradient_accumulation_steps=2"), marks=LONG),
        pytest.param(("recipe=mixed-20", "zero_grad_before=backward"), marks=LONG),
    ],
    ids=" ".join,
)
def test_phases_are_those_of_pytorch(words: tuple[str, ...]) -> None:
    """Within 0.1 %, which is what the remainders of small blocks are here."""
    estimated = memcalc.estimate(*SIZES, *words).ledger.totals
    traced = memcalc.trace(*SIZES, *words, steps=2).result.ledger.totals

    for phase in ("zero_grad_2", "forward_2", "loss_2", "backward_2", "optimizer_step_2"):
        assert estimated[phase] == pytest.approx(traced[phase], rel=1e-3), phase
