"""FSDP2's policy, its units and its reductions by PyTorch itself, on fake tensors, against the estimate."""

from __future__ import annotations

import pytest

import memcalc

SIZES = (
    *("llama-3.2-1b", "num_layers=2", "hidden_size=256", "num_attention_heads=8", "num_key_value_heads=8"),
    *("head_dim=32", "intermediate_size=1024", "vocab_size=4096", "tie_word_embeddings=false", "b=2", "s=64"),
    *("engine=fsdp2", "data_parallel=4", "fsdp.param_dtype=bf16"),
)
LONG = pytest.mark.long
# Where the last backward frees unsharded sums unit by unit, and the estimate counts them until it ends.
FREED_WITHIN_BACKWARD = 0.02


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (("zero_stage=3", "fsdp.reduce_dtype=fp32", "fsdp.wrap=layers-and-ends"), 0.0),
        (("zero_stage=3", "fsdp.gradient_sync=last", "gradient_accumulation_steps=3"), 0.0),
        pytest.param(("zero_stage=3",), 0.0, marks=LONG),
        pytest.param(("zero_stage=3", "recipe=amp"), 0.0, marks=LONG),
        pytest.param(("zero_stage=3", "recipe=amp", "implementation=huggingface"), 0.0, marks=LONG),
        pytest.param(("zero_stage=2", "fsdp.reduce_dtype=fp32", "fsdp.wrap=layers-and-ends"), 0.0, marks=LONG),
        pytest.param(("zero_stage=3", "finetune=lora", "lora.base_dtype=compute"), 0.0, marks=LONG),
        pytest.param(
            (
                *("zero_stage=3", "fsdp.reduce_dtype=fp32", "fsdp.wrap=layers-and-ends"),
                *("fsdp.gradient_sync=last", "gradient_accumulation_steps=3"),
            ),
            FREED_WITHIN_BACKWARD,
            marks=LONG,
        ),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_phases_are_those_of_pytorch(words: tuple[str, ...], more: float) -> None:
    """Within 0.05 %, which is what the remainders of small blocks are here."""
    estimated = memcalc.estimate(*SIZES, *words).ledger.totals
    traced = memcalc.trace(*SIZES, *words, steps=2).result.ledger.totals

    for phase in ("zero_grad_2", "forward_2", "loss_2", "backward_2", "optimizer_step_2"):
        assert -5e-4 <= estimated[phase] / traced[phase] - 1 <= 5e-4 + more, phase
