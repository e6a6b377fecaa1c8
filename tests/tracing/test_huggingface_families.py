"""Families of transformers by formulas and traced: the same bytes in every phase of a step."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.ledger.component import Component
from memcalc.spec.model_families.conversion import attends_eagerly

SIZES: dict[str, object] = {
    "num_layers": 3,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 2000,
    "max_position_embeddings": 256,
}
GROUPED: dict[str, object] = {"num_key_value_heads": 2, "intermediate_size": 416, "vocab_size": 4096}
WINDOWS: dict[str, dict[str, object]] = {
    "reads all": {"full_attention_interval": 2},
    "has a mask": {"full_attention_layers": [0, 2], "full_attention_interval": 0, "sliding_window": 64},
}
FULL = {"head_dim": 64, "num_key_value_heads": 1, "keys_as_values": True}
EXPERTS = {"num_experts": 8, "num_experts_per_token": 2, "expert_intermediate_size": 96}
GEMMA4: dict[str, object] = {
    "architecture": "gemma4_text",
    "full_attention_interval": 3,
    "full_attention": FULL,
    "head_dim": 48,
}
FAMILIES: dict[str, dict[str, object]] = {
    "falcon": {"architecture": "falcon", "num_key_value_heads": 1},
    "falcon, a key head for each query head": {"architecture": "falcon"},
    "falcon, groups of heads": {**GROUPED, "architecture": "falcon", "norms_per_layer": 2},
    "falcon, groups of heads and one norm": {**GROUPED, "architecture": "falcon"},
    "falcon, alibi": {"architecture": "falcon", "position_embedding": "alibi"},
    "falcon, alibi and biases, one after the other": {"architecture": "falcon", "position_embedding": "alibi"}
    | {"parallel_block": False, "norms_per_layer": 2, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "gpt_bigcode": {**GROUPED, "architecture": "gpt_bigcode", "num_key_value_heads": 1},
    "gpt_bigcode, a key head for each query head": {"architecture": "gpt_bigcode"},
    "gpt_neo": {"architecture": "gpt_neo"},
    "gpt_neox": {"architecture": "gpt_neox"},
    "gpt_neox one after the other": {"architecture": "gpt_neox", "parallel_block": False, "qkv_bias": False}
    | {"output_bias": False, "mlp": "relu"},
    "gpt_neox gelu_fast": {"architecture": "gpt_neox", "gelu": "fast"},
    "opt": {"architecture": "opt"},
    "phi": {**GROUPED, "architecture": "phi"},
    "phi tied, whole heads turned": {"architecture": "phi", "tie_word_embeddings": True, "rotary_dim": 32},
    "opt norms behind": {"architecture": "opt", "final_norm": False, "embedding_size": 64},
    "llama, one key head": {**GROUPED, "architecture": "llama", "num_key_value_heads": 1},
    **{family: {"architecture": family, "num_attention_heads": 8, "rotary_dim": 8} for family in ("codegen", "gptj")},
    **{family: {"architecture": family, "num_attention_heads": 8} for family in ("bloom", "mpt")},
    **{
        family: {**GROUPED, "architecture": family}
        for family in ("arcee", "cohere", "gemma2", "granite", "nanochat", "olmo", "olmo2", "stablelm", "starcoder2")
    },
    **{
        family: {**GROUPED, "architecture": family} | {"head_dim": 48}
        for family in ("ernie4_5", "gemma", "glm", "glm4", "phi3", "seed_oss")
    },
    "cohere with norms of heads": {**GROUPED, "architecture": "cohere", "qk_norm": True, "head_dim": 48},
    "stablelm side by side": {**GROUPED, "architecture": "stablelm", "parallel_block": True, "norms_per_layer": 1},
    **{
        f"{family}, every second layer {how}": {**GROUPED, "architecture": family, **windows}
        for family in ("cohere2", "exaone4", "gemma3_text", "olmo3")
        for how, windows in WINDOWS.items()
    },
    "gemma4_text": {**GROUPED, **GEMMA4},
    "gemma4_text, experts": {**GROUPED, **GEMMA4, "moe": EXPERTS | {"dense_mlp": True}},
    "smollm3, every second layer turns nothing": {**GROUPED, "architecture": "smollm3", "unrotated_interval": 2},
    "smollm3, all but the first turn": {**GROUPED, "architecture": "smollm3", "unrotated_interval": 0}
    | {"unrotated_layers": [0]},
    "phi3 with windows": {**GROUPED, "architecture": "phi3", "rotary_dim": 16, "sliding_window": 64},
}
FUSED = ("attention=flash", "recipe=pure", "b=2")
EAGER = ("attention=eager", "recipe=amp", "b=2", "dropout=0.1")
SETTINGS: dict[str, tuple[str, ...]] = {
    "flash": FUSED,
    "flash, one sequence, masters": ("attention=flash", "recipe=mixed-18", "b=1", "s=99", "dropout=0.1"),
    "memory-efficient, fp32": ("attention=memory-efficient", "recipe=fp32", "b=3", "optimizer_implementation=fused"),
    "eager, autocast": EAGER,
    "eager, one sequence": ("attention=eager", "recipe=mixed-20", "b=1", "dropout=0"),
    "recomputed": (*EAGER, "recompute=full"),
    "every second recomputed": (*FUSED, "recompute=every-2", "logits_until=loss"),
    "a loop": (*FUSED, "optimizer_implementation=for-loop", "optimizer=adam"),
    "LoRA": (*EAGER, "finetune=lora", "lora.rank=4"),
    "LoRA, every second recomputed": (*FUSED, "recompute=every-2", "finetune=lora", "lora.rank=4"),
    "saved on the host": (*FUSED, "offload_activations=pinned"),
}
PHASES = ("forward_2", "loss_2", "backward_2", "optimizer_step_2")


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_phase_asks_for_the_same_bytes(family: str, setting: str) -> None:
    """Without what blocks add. Of the loss the shifted labels are left out; of one sequence they are no copy."""
    model, words = SIZES | FAMILIES[family], ("s=256", *SETTINGS[setting])
    shares = model["architecture"] == "falcon" and model.get("num_key_value_heads") == 1
    if shares or attends_eagerly(model["architecture"], "huggingface"):
        words = tuple("attention=eager" if word.startswith("attention=") else word for word in words)
    if model["architecture"] == "falcon":  # because its layers always have a mask
        words = tuple("attention=memory-efficient" if word == "attention=flash" else word for word in words)
    if model["architecture"] == "mpt":  # its configuration has integers for a rate of dropout
        words = tuple("dropout=0" if word.startswith("dropout=") else word for word in words)
    run = {"model": model, "training": {"implementation": "huggingface"}}
    estimated, traced = memcalc.estimate(run, *words).ledger, memcalc.trace(run, *words, steps=2).ledger
    tokens = 99 if "s=99" in words else 256
    b = int(next(word for word in words if word.startswith("b="))[2:])
    labels = 8 * b * (tokens + 1) + (8 * b * tokens if b > 1 else 0)

    for phase in PHASES:
        asked = [
            ledger.totals[phase] - ledger.components(phase).get(Component.BLOCK_ROUNDING, 0)
            for ledger in (estimated, traced)
        ]
        assert 0 <= asked[1] - asked[0] <= (labels if phase == "loss_2" else 0), phase


@pytest.mark.long
@pytest.mark.parametrize(
    "setting", ["flash", "eager, one sequence", "recomputed", "LoRA", "LoRA, every second recomputed"]
)
@pytest.mark.parametrize("window", [0, 64])
def test_heads_that_flash_attention_lacks_ask_for_the_same_bytes(setting: str, window: int) -> None:
    """Of 264 features; a sequence fills the window of 64 tokens. Allocated bytes, remainders of blocks included."""
    full = {"head_dim": 264, "num_key_value_heads": 2}
    model = SIZES | GROUPED | GEMMA4 | {"full_attention": full} | ({"sliding_window": window} if window else {})
    run = {"model": model, "training": {"implementation": "huggingface"}}
    words = ("s=256", *SETTINGS[setting])
    estimated, traced = memcalc.estimate(run, *words).replayed.ledger, memcalc.trace(run, *words, steps=2).ledger

    for phase in PHASES:
        assert estimated.totals[phase] == pytest.approx(traced.totals[phase], rel=1e-2), phase
