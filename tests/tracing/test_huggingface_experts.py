"""Transformers' families with experts by formulas and traced: the same bytes in every phase of a step."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.ledger.component import Component

SMALL = ("num_layers=3", "V=2000", "s=256", "hidden_size=192", "num_attention_heads=4", "implementation=huggingface")
HEADS = ("num_key_value_heads=2", "head_dim=32", "intermediate_size=128")
FAMILIES: dict[str, tuple[str, ...]] = {
    "mixtral": ("mixtral-8x7b", *SMALL, *HEADS, "moe.expert_intermediate_size=128"),
    "qwen2_moe": (
        *("qwen1.5-moe-a2.7b", *SMALL, *HEADS, "moe.num_experts=16", "moe.expert_intermediate_size=96"),
        "moe.shared_expert_intermediate_size=128",
    ),
    "qwen3_moe": ("qwen3-30b-a3b", *SMALL, *HEADS, "moe.num_experts=16", "moe.expert_intermediate_size=96"),
}
SETTINGS: dict[str, tuple[str, ...]] = {
    "flash": ("recipe=pure", "b=2"),
    "memory-efficient, masters": ("attention=memory-efficient", "recipe=mixed-18", "b=1"),
    "eager, autocast": ("attention=eager", "recipe=amp", "b=2", "attention_dropout=0.1"),
    "flash, autocast in fp16": ("recipe=amp", "dtype=fp16", "b=3", "logits_until=loss"),
    "fp32": ("attention=eager", "recipe=fp32", "b=2", "optimizer_implementation=fused"),
    "fp32, a loop": ("attention=eager", "recipe=fp32", "b=2", "optimizer_implementation=for-loop"),
    "recomputed": ("recipe=pure", "b=2", "recompute=full"),
    "LoRA": ("recipe=pure", "b=2", "finetune=lora", "lora.target_modules=attention"),
    "saved on the host": ("recipe=pure", "b=2", "offload_activations=pinned"),
    "FSDP2": ("recipe=pure", "b=2", "engine=fsdp2", "zero_stage=3", "data_parallel=4"),
}
TABLES = 32 * 2**10  # of FSDP2's copy kernels: addresses and sizes of what they copy


# Of what precedes the largest parameter, a norm of heads, the estimate has one temporary that the trace has not.
NORM = pytest.mark.xfail(strict=True, reason="the update of qwen3_moe one by one: 128 bytes too high")


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "setting"),
    [
        pytest.param(family, setting, marks=[NORM] if (family, setting) == ("qwen3_moe", "fp32, a loop") else [])
        for family in FAMILIES
        for setting in SETTINGS
    ],
)
def test_every_phase_asks_for_the_same_bytes(family: str, setting: str) -> None:
    """Without what blocks add. Of the loss the shifted labels are left out; of one sequence they are no copy."""
    run = (*FAMILIES[family], *SETTINGS[setting])
    estimated, traced = memcalc.estimate(*run).ledger, memcalc.trace(*run, steps=2).ledger
    b = int(next(word for word in run if word.startswith("b="))[2:])
    labels = 8 * b * (256 + 1) + (8 * b * 256 if b > 1 else 0)

    for phase in ("forward_2", "loss_2", "backward_2", "optimizer_step_2"):
        asked = [
            ledger.totals[phase] - ledger.components(phase).get(Component.BLOCK_ROUNDING, 0)
            for ledger in (estimated, traced)
        ]
        tables = phase == "forward_2" and setting == "FSDP2"
        more = TABLES if tables else 0
        assert 0 <= asked[1] - asked[0] - (labels if phase == "loss_2" else 0) <= more, phase
