"""LitGPT's adapters: one of q, k and v together, beside a fused matrix; arithmetic, rules, grids."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.sweeping.evaluation import evaluate
from tests.sweeping.test_evaluation import assert_same

TOKENS, WIDTH, HEADS, HEAD, RANK = 2 * 512, 64, 4, 16, 8
SIZES = (
    *("num_layers=2", f"hidden_size={WIDTH}", f"num_attention_heads={HEADS}", f"head_dim={HEAD}"),
    *("intermediate_size=128", "vocab_size=32768", "b=2", "s=512", "optimizer=sgd", "tie_word_embeddings=false"),
)
LORA = ("recipe=pure", "lora.implementation=litgpt", f"lora.rank={RANK}", "lora.adapter_dtype=compute")


def run(*words: str, kv: int = HEADS) -> Ledger:
    return memcalc.estimate("llama-3.2-1b", *SIZES, f"num_key_value_heads={kv}", *LORA, *words).ledger


def trained(ledger: Ledger) -> int:
    """Elements of bf16 gradients in the optimizer's step."""
    return sum(
        row.bytes // 2
        for row in ledger.rows
        if row.component is Component.GRADIENTS and "optimizer_step_2" in row.phases
    )


@pytest.mark.parametrize(
    ("targets", "kv", "outputs"),
    [
        ("[q_proj, v_proj]", 4, (4 + 4) * HEAD),
        ("[q_proj, v_proj]", 2, (4 + 2) * HEAD),
        ("[q_proj, k_proj, v_proj]", 2, (4 + 2 + 2) * HEAD),
        ("[v_proj]", 2, 2 * HEAD),
    ],
)
def test_one_adapter_has_ranks_of_each_part(targets: str, kv: int, outputs: int) -> None:
    """litgpt/lora.py, LoRAQKVLinear: A is n·r x d, B is the outputs of the n parts x r."""
    parts = targets.count("_proj")

    assert trained(run(f"lora.target_modules={targets}", kv=kv)) == 2 * RANK * (parts * WIDTH + outputs)


def saved(*words: str, kv: int) -> int:
    """Bytes saved by attention's projections in a layer other than the first, where the input needs no gradient."""
    return sum(
        row.bytes // row.count
        for row in run(*words, "logits_until=loss", kv=kv).rows
        if row.component is Component.ACTIVATIONS
        and "loss_2" in row.phases
        and row.module == "layers.*"
        and row.tensor.startswith(("attention.qkv_proj", "attention.q_proj", "attention.k_proj", "attention.v_proj"))
    )


def test_what_backward_needs_of_the_adapter() -> None:
    """Dropout's output 2 and mask 1 of d; ranks 2·n·r; B's outputs, for zeros are put beside them, and where: 8 each.

    With all three parts nothing is padded, and with grouped heads k and v are copied, so the sum is freed.
    """
    two = saved("lora.target_modules=[q_proj, v_proj]", "lora.dropout=0.1", "repeat_kv=true", kv=2)
    outputs = (4 + 2) * HEAD
    assert two == TOKENS * (3 * WIDTH + 2 * 2 * RANK + 2 * outputs) + 8 * outputs

    three = saved("lora.target_modules=[q_proj, k_proj, v_proj]", "lora.dropout=0.1", "repeat_kv=true", kv=2)
    assert three == TOKENS * (3 * WIDTH + 2 * 3 * RANK)


def test_values_that_are_a_view_keep_the_whole_sum() -> None:
    """Without grouped heads the kernel saves v as it lies within q, k and v: 2·3·d, in place of 2·d."""
    views = saved("lora.target_modules=[o_proj]", "heads_first=true", kv=HEADS)

    assert views == TOKENS * 2 * 3 * WIDTH


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("implementation=huggingface",),
            (
                "--set: training.lora.implementation: lora.implementation = litgpt does not support implementation = "
                "huggingface. Set lora.implementation: peft, or implementation: plain."
            ),
        ),
        (("lora.target_modules=[qkv_proj]",), "target_modules names qkv_proj"),
    ],
)
def test_what_litgpt_does_not_have(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as raised:
        run(*words)

    assert message in str(raised.value)


def test_tables_equal_single_estimates() -> None:
    axes: dict[Any, Any] = {
        "lora.implementation": ["peft", "litgpt"],
        # every two of them in all combinations
        ("lora.rank", "lora.dropout", "num_key_value_heads"): [(4, 0.0, 2), (4, 0.1, 4), (8, 0.0, 4), (8, 0.1, 2)],
        "finetune": ["lora", "qlora"],
        "b": [1, 4],
    }
    model = {"l": 3, "d": 64, "h": 4, "V": 1000, "tie_word_embeddings": False}
    config = {"model": model, "training": {"s": 64, "recipe": "pure"}}
    assert_same(config, evaluate(config, axes))
