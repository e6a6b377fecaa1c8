"""Order in which modules of transformers, torchtitan and Megatron-Core register parameters (`model.parameters()`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from memcalc.layout.local_parameters import LocalParameter, LocalParameters

TORCHTITAN, MEGATRON = "torchtitan", "megatron"
# Families that register a layer's modules in another order than its forward (transformers 5.23, models/<family>).
_KEYS_FIRST = ("attention.k", "attention.v", "attention.q", "attention.o")
_PROJECTIONS = (
    "attention.q_proj",
    "attention.qkv_proj",
    "attention.k_proj",
    "attention.v_proj",
    "attention.o_proj",
    "attention.",
)
# LlamaDecoderLayer and its copies; QK norms follow the projections.
_NORMS_LAST = (*_PROJECTIONS, "mlp.", "input_norm", "post_attention_norm")
_EXPERTS_FIRST = (*_PROJECTIONS, "mlp.experts", "mlp.router", "mlp.", "input_norm", "post_attention_norm")
_LATENT_EXPERTS_FIRST = ("attention.", "mlp.experts", "mlp.router", "mlp.", "input_norm", "post_attention_norm")
_IN_LAYERS: dict[str, tuple[str, ...]] = {
    "apertus": _NORMS_LAST,
    "arcee": _NORMS_LAST,
    "deepseek_v2": _LATENT_EXPERTS_FIRST,
    "deepseek_v3": _LATENT_EXPERTS_FIRST,
    "falcon": ("attention.", "mlp.", "input_norm", "post_attention_norm"),
    "gemma4_text": ("attention.q", "attention.k_norm", *_NORMS_LAST),
    "glm4_moe": _EXPERTS_FIRST,
    "gpt_neo": ("input_norm", *_KEYS_FIRST, "post_attention_norm", "mlp."),
    "gpt_neox": ("input_norm", "post_attention_norm", "attention.", "mlp."),
    "gpt_oss": ("attention.sinks", *_PROJECTIONS, "mlp.", "input_norm", "post_attention_norm"),
    "gptj": ("input_norm", *_KEYS_FIRST, "mlp."),
    "granitemoe": (*_PROJECTIONS, "input_norm", "post_attention_norm", "mlp."),
    "llama4_text": _EXPERTS_FIRST,
    # Megatron-LM core_v0.16.1 core/transformer/attention.py: the output projection precedes that of q, k and v
    MEGATRON: ("input_norm", "attention.o_proj", "attention.qkv_proj", "attention.", "post_attention_norm", "mlp."),
    "nemotron": _NORMS_LAST,
    "nemotron_h": ("input_norm", "mlp.experts", "mlp.router", "mlp."),
    "opt": (*_KEYS_FIRST, "input_norm", "mlp.", "post_attention_norm"),
    "phi": ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "attention.", "mlp.", "i"),
    "phi3": ("attention.o_proj", "attention.", "mlp.", "input_norm", "post_attention_norm"),
    "qwen3_5_moe_text": ("linear_attn.", *_PROJECTIONS, "mlp.", "input_norm", "post_attention_norm"),
    "qwen3_5_text": ("linear_attn.", *_NORMS_LAST),
    "qwen3_moe": _EXPERTS_FIRST,
    "qwen3_next": (
        *("linear_attn.dt", "linear_attn.A_log", "linear_attn.conv1d", "linear_attn.in_proj", "linear_attn."),
        *(*_PROJECTIONS, "mlp.", "input_norm", "post_attention_norm"),
    ),
    "starcoder2": _NORMS_LAST,
    # torchtitan 0.2.2 torchtitan/models/{llama3,qwen3,deepseek_v3}/model/model.py and models/moe/moe.py: w1, w2 and w3
    # are gate, down and up
    TORCHTITAN: (
        *("attention.q_norm", "attention.k_norm", "attention.q_proj", "attention.q_a", "attention.q_b"),
        *("attention.kv_a_proj", "attention.kv_a_norm", "attention.kv_b", *_PROJECTIONS),
        *(f"mlp.{part}{name}" for part in ("experts.",) for name in ("gate", "down", "up")),
        "mlp.router",
        *(f"mlp.{part}{name}" for part in ("shared_experts.", "") for name in ("gate", "down", "up")),
        *("input_norm", "post_attention_norm"),
    ),
}
_BEFORE_LAYERS: dict[str, tuple[str, ...]] = {
    "opt": ("embed_tokens", "embed_positions", "project_out", "project_in", "norm"),  # OPTDecoder
}


def registered(
    parameters: LocalParameters, family: str
) -> tuple[list[LocalParameter], list[LocalParameter], list[LocalParameter]]:
    """Return the parameters before the layers, of one layer, and after the layers, in registration order.

    Without a family, in the order of the forward pass. DeepSpeed's PipelineModule registers tied modules before it
    builds any layer (0.19 runtime/pipe/module.py, __init__).
    """
    gated = any("gate" in parameter.module for parameter in parameters)
    inside = _IN_LAYERS.get(family, _NORMS_LAST if family and gated else ())
    before = _BEFORE_LAYERS.get(family, ())

    parts: tuple[list[LocalParameter], list[LocalParameter], list[LocalParameter]] = ([], [], [])
    for parameter in parameters:
        early = parameter.where == "embedding" or parameter.module in before or parameter.replica
        parts[1 if parameter.where == "layer" else 0 if early else 2].append(parameter)
    for part, prefixes in zip(parts, (before, inside, ()), strict=True):
        part.sort(key=lambda parameter: _first(prefixes, parameter.module.rpartition("*.")[2]))
    return parts


def _first(prefixes: tuple[str, ...], name: str) -> int:
    return next((at for at, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))


def in_order(parameters: LocalParameters, family: str, prefixes: Sequence[str] = ()) -> Iterator[LocalParameter]:
    """Yield each parameter of a model in registration order: embedding, each layer, LM head.

    Args:
        parameters: each with the number of layers that have it.
        family: the transformers family, TORCHTITAN or MEGATRON; empty: in the order of the forward pass.
        prefixes: of each layer's modules, where layers differ; empty: layers of one type come first.
    """
    embedding, layers, head = registered(parameters, family)
    for alike in _by_layers(embedding):  # layers of a vision tower
        for layer in range(max(parameter.count for parameter in alike)):
            yield from (parameter for parameter in alike if layer < parameter.count)
    kinds: dict[str, list[LocalParameter]] = {}
    for parameter in layers:
        kinds.setdefault(parameter.module.partition("*.")[0], []).append(parameter)
    if len(kinds) > 1 and prefixes:
        for prefix in prefixes:
            yield from kinds.get(prefix, ())
    else:
        for alike in kinds.values():
            for _ in range(max(parameter.count for parameter in alike)):
                yield from alike
    yield from head


def _by_layers(parameters: Sequence[LocalParameter]) -> Iterator[list[LocalParameter]]:
    """Yield consecutive parameters of the same layers together, and each of the others alone."""
    for prefix, grouped in groupby(parameters, key=lambda parameter: parameter.module.rpartition("*.")[0]):
        alike = [*grouped]
        yield from [alike] if prefix else ([parameter] for parameter in alike)
