"""Small models of every family, and settings to compare requests under: see tools/request_order.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import memcalc
from memcalc.spec.spec import Spec

SIZES: dict[str, object] = {
    "num_layers": 3,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
}
GROUPED: dict[str, object] = {"num_key_value_heads": 4, "intermediate_size": 1536}
EXPERTS: dict[str, object] = {"num_experts": 8, "num_experts_per_token": 2, "expert_intermediate_size": 512}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 512}
WITH_EXPERTS = {"head_dim": 64, "intermediate_size": 512, "moe": EXPERTS}
FEW_DENSE = {"head_dim": 64, "moe": SHARED | {"first_dense_layers": 1}}
LIKE_LLAMA = """
    arcee cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 granite hunyuan_v1_dense llama mistral
    nanochat nemotron olmo olmo2 olmo3 phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2
"""


def _alike(families: str, sizes: dict[str, object]) -> dict[str, dict[str, object]]:
    return dict.fromkeys(families.split(), sizes)


FAMILIES: dict[str, dict[str, object]] = {
    **_alike(LIKE_LLAMA, GROUPED),
    **_alike("bloom gpt2 gpt_neo gpt_neox mpt opt", {}),
    **_alike("codegen gptj", {"rotary_dim": 32}),
    **_alike("falcon gpt_bigcode", {"num_key_value_heads": 1}),
    **_alike("flex_olmo gpt_oss granitemoe minimax_m2 mixtral olmoe phimoe qwen3_moe", GROUPED | WITH_EXPERTS),
    **_alike("ernie4_5_moe glm4_moe", GROUPED | FEW_DENSE),
    **_alike("qwen2_moe", GROUPED | {"moe": SHARED}),
    "gemma4_text": GROUPED
    | {
        "head_dim": 32,
        "full_attention_interval": 3,
        "full_attention": {"head_dim": 64, "num_key_value_heads": 2, "keys_as_values": True},
    },
    "llama4_text": GROUPED
    | {"num_layers": 4, "full_attention_interval": 2, "head_dim": 64, "moe": SHARED | {"expert_interval": 2}},
}
PURE = ("recipe=pure",)
SETTINGS: dict[str, tuple[str, ...]] = {
    "pure": PURE,
    "amp": ("recipe=amp",),
    "mixed-16": ("recipe=mixed-16",),
    "mixed-18": ("recipe=mixed-18",),
    "mixed-20": ("recipe=mixed-20",),
    "fp32": ("recipe=fp32", "attention=memory-efficient"),
    "math": ("recipe=fp32", "attention=math"),
    "math, recomputed": ("recipe=fp32", "attention=math", "recompute=full", "dropout=0.1"),
    "eager": (*PURE, "attention=eager"),
    "eager, dropout": (*PURE, "attention=eager", "dropout=0.1"),
    "eager, amp": ("recipe=amp", "attention=eager", "dropout=0.1"),
    "recomputed": (*PURE, "recompute=full"),
    "recomputed, amp": ("recipe=amp", "recompute=full"),
    "every second recomputed": ("recipe=amp", "recompute=every-2", "attention=eager"),
    "selective": ("recipe=amp", "recompute=selective", "attention=eager"),
    "fused": (*PURE, "optimizer_implementation=fused"),
    "for-loop": (*PURE, "optimizer_implementation=for-loop"),
    "chunked": (*PURE, "loss=chunked"),
    "chunked, amp": ("recipe=amp", "loss=chunked"),
    "accumulated": (*PURE, "gradient_accumulation_steps=3"),
    "sgd": (*PURE, "optimizer=sgd"),
    "lion": (*PURE, "optimizer=lion", "optimizer_implementation=for-loop"),
    "GaLore": (*PURE, "optimizer=galore", "optimizer_options.rank=16"),
    "LoRA": (*PURE, "finetune=lora", "lora.rank=8"),
    "LoRA, amp": ("recipe=amp", "finetune=lora", "lora.rank=8", "recompute=full"),
}
EAGER_ONLY = ("codegen", "falcon", "gpt_oss")  # transformers' modules, at these sizes
# Families with requests that differ from the trace in some settings.
DIFFERING = {"plain": {"bloom", "mpt"}, "huggingface": set[str]()}


def spec_of(family: str, implementation: str, setting: str) -> Spec:
    """A small model of a family in a setting.

    Raises:
        InputError: these modules cannot do what the setting asks for.
    """
    return small(family, implementation, SETTINGS[setting])


def small(family: str, implementation: str, words: Iterable[str]) -> Spec:
    """A small model of a family.

    Raises:
        InputError: these modules cannot do what the words ask for.
    """
    if implementation == "huggingface" and family in EAGER_ONLY:
        words = (*(word for word in words if not word.startswith("attention=")), "attention=eager")
    run = {
        "model": SIZES | FAMILIES[family] | {"architecture": family},
        "training": {"implementation": implementation},
    }
    return memcalc.load(run, "b=2", "s=128", *words, gpu="a100-80gb")


def cases() -> Iterator[tuple[str, str, str]]:
    """Every family, whoever wrote its modules, and setting."""
    for family in FAMILIES:
        for implementation in ("plain", "huggingface"):
            for setting in SETTINGS:
                yield family, implementation, setting


def equal_requests() -> str:
    """Return the families with equal requests, as a list in Markdown."""
    plain, theirs = (sorted(FAMILIES.keys() - differing) for differing in DIFFERING.values())
    settings = "recipes, attention, recomputation, optimizers, accumulation, LoRA"
    lines = (
        f"With small models of {len(FAMILIES)} families and {len(SETTINGS)} settings ({settings}), all are equal for",
        "",
        f"- plain modules ({len(plain)} families): {', '.join(plain)};",
        f"- transformers' modules ({len(theirs)} families): {', '.join(theirs)}.",
    )
    return "\n".join(lines) + "\n"


TABLES = {"equal-requests": equal_requests}
