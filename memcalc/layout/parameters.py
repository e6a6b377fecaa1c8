"""Parameters of a model as rows: shape in symbols and sizes, number of copies, and how tensor parallelism shards each.

These rows are the only place that knows the layout of the weights; counts, bytes, shards and the formulas in reports
come from them. Linear weights are [out, in], as in torch.nn.Linear. Symbols:

    d hidden   h heads   h_kv key/value heads   d_h head   F MLP   V vocabulary   S positions   d_e embedding
    E experts   F_e expert   F_s shared expert   r_q, r_kv latents   d_n, d_r, d_v latent attention's head parts
    h_lv, d_lv value heads of linear attention   d_mix its queries, keys and values   w_c its convolution
    h_kvf, d_hf key/value heads and head of layers with full attention, where these differ
    h_m Mamba-2 heads   d_m all of them   d_conv channels of its convolution   d_in outputs of its projection
    d_l latent of routed experts
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from memcalc.spec.layers import windows_among
from memcalc.spec.model import (
    ATTENTION,
    EXPERTS,
    MAMBA,
    MLP,
    FullAttentionSpec,
    LinearAttentionSpec,
    MambaSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
)
from memcalc.spec.model_families.conversion import family_buffers
from memcalc.spec.towers import VISION, tower_parameters

Axis = tuple[str, int]
Where = Literal["embedding", "layer", "head"]

# How tensor parallelism over t ranks shards a tensor:
#   column      axis 0 (the outputs), biases too
#   row         axis 1 (the inputs); the bias is "replicated"
#   vocab       axis 0, the vocabulary
#   expert      axis 0 counts experts (expert parallelism shards it); t shards the axis that holds F_e
#   replicated  full on every rank
Split = Literal["column", "row", "vocab", "expert", "replicated"]


# Prefixes of the modules of layers, where layers differ: in their MLP, in their attention, or in their single module.
DENSE, MOE = "layers.dense.", "layers.moe."
LINEAR, FULL, WINDOW = "layers.linear.", "layers.full.", "layers.window."
MIXERS = {MAMBA: "mamba", ATTENTION: "attention", MLP: "mlp", EXPERTS: "moe"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor, and the number of layers that have one of this shape."""

    module: str  # its module; `layers.*` means all layers, `layers.dense.*` and `layers.moe.*` where layers differ
    # "weight" or "bias"; "table" for a matrix of a vision tower that belongs to no linear layer
    tensor: Literal["weight", "bias", "table"]
    shape: tuple[Axis, ...]  # each axis as (symbol, size)
    count: int  # number of such tensors in the whole model
    part: Where  # the part of a pipeline that it belongs to; the final norm belongs to the head
    split: Split  # how tensor parallelism shards it

    @property
    def elements(self) -> int:
        """Elements of one such tensor."""
        return prod(size for _, size in self.shape)

    @property
    def total(self) -> int:
        """Elements of all such tensors together."""
        return self.count * self.elements

    @property
    def formula(self) -> str:
        """Elements of one such tensor in symbols, e.g. "V·d"."""
        return formula_of(self.shape)


def formula_of(axes: tuple[Axis, ...]) -> str:
    """Return the elements of a tensor in symbols, for example "F/t·d"."""
    return "·".join(f"({symbol})" if "+" in symbol else symbol for symbol, _ in axes)


@lru_cache(maxsize=256)
def parameter_table(model: ModelSpec) -> tuple[Parameter, ...]:
    """Return all parameters of a model in the order of the forward pass; a tied LM head has no row."""
    rows: list[Parameter] = []
    _add_embedding(rows, model)
    for prefix, count, moe in _layer_kinds(model):
        layer = _Part(rows, "layer", prefix, count)
        _add_layer(layer, model, moe)
    _add_head(rows, model)
    return (*_tower(model), *rows)


def _tower(model: ModelSpec) -> tuple[Parameter, ...]:
    """Return the parameters of the vision tower, which a pipeline keeps with the embedding; none is sharded by TP."""
    if model.vision_config is None:
        return ()
    return tuple(
        Parameter(
            row.module,
            row.tensor,
            tuple((str(size), size) for size in row.shape),
            row.layers,
            "embedding",
            "replicated",
        )
        for row in tower_parameters(model.vision_config)
    )


def trains_with_text(module: str) -> bool:
    """Return whether a module of the model is part of its language model."""
    return not module.startswith(VISION)


@lru_cache(maxsize=256)
def count_parameters(model: ModelSpec) -> int:
    """Return the number of parameters of a model, tied ones counted once, as in transformers."""
    return sum(row.total for row in parameter_table(model)) + frozen_parameters(model)


def frozen_parameters(model: ModelSpec) -> int:
    """Return the number of parameters without gradient: router biases, unless they are buffers. They have no rows."""
    moe = model.moe
    if moe is None or not moe.router_correction_bias or not moe.router_correction_parameter:
        return 0
    return model.layers_with_experts(0, model.num_layers) * moe.num_experts


@lru_cache(maxsize=256)
def buffer_elements(model: ModelSpec) -> int:
    """Return the elements of the buffers that transformers registers: router biases, RoPE caches, scales, masks."""
    corrections = model.layers_with_experts(0, model.num_layers) * corrections_of_a_router(model)
    buffers = family_buffers(model.architecture)
    scalars = buffers.scalars + buffers.layer_scalars * model.num_layers
    return corrections + table_elements(model) + scalars + mask_elements(model)


def corrections_of_a_router(model: ModelSpec) -> int:
    """Return the number of elements in one router's bias (`e_score_correction_bias`), where it is a buffer."""
    moe = model.moe
    if moe is None or not moe.router_correction_bias or moe.router_correction_parameter:
        return 0
    return moe.num_experts


def table_elements(model: ModelSpec) -> int:
    """Return the elements of all RoPE buffers."""
    buffers = family_buffers(model.architecture)
    if model.position_embedding != "rope" and not buffers.unused_rotary:
        return 0
    if buffers.sinusoids:
        # each layer has a separate table of sines and cosines: [S, rotary_dim]
        return model.num_layers * model.max_position_embeddings * model.rotary_dim
    # One frequency for each pair of rotated dimensions; `inv_freq` and the copy `original_inv_freq`.
    windows, full = windows_among(model)
    if model.full_attention is not None:  # RoPE rotates whole heads
        heads = (model.rotary_dim,) * windows + (model.full_attention.head_dim,) * full
    else:
        heads = (model.rotary_dim,) * min(buffers.rotary_tables, windows + full)
    return sum(2 * ((rotated + 1) // 2) for rotated in heads)


def mask_elements(model: ModelSpec) -> int:
    """Return the elements of causal-mask buffers, one byte each."""
    masks = {"model": 1, "layer": model.num_layers, None: 0}[family_buffers(model.architecture).masks]
    return masks * model.max_position_embeddings**2


@dataclass(frozen=True, slots=True)
class _Part:
    """Appends the rows of one part of the model."""

    rows: list[Parameter]
    where: Where
    prefix: str = ""
    count: int = 1

    def tensor(self, module: str, tensor: Literal["weight", "bias"], shape: tuple[Axis, ...], split: Split) -> None:
        self.rows.append(Parameter(self.prefix + module, tensor, shape, self.count, self.where, split))

    def linear(self, module: str, out: Axis, into: Axis, split: Split, *, bias: bool = False) -> None:
        self.tensor(module, "weight", (out, into), split)
        if bias:
            # A row-parallel layer adds its bias after the all-reduce, so each rank holds the full bias.
            self.tensor(module, "bias", (out,), "replicated" if split == "row" else split)

    def norm(self, module: str, width: Axis, model: ModelSpec, split: Split = "replicated") -> None:
        if model.norm_weight:
            self.tensor(module, "weight", (width,), split)
            if model.norm_has_bias:
                self.tensor(module, "bias", (width,), split)


def _layer_kinds(model: ModelSpec) -> list[tuple[str, int, MoeSpec | None]]:
    """Return the layer types: name prefix, number of layers, and the experts of each."""
    moe = model.moe
    if model.layer_pattern:
        counted = ((letter, model.mixers.count(letter)) for letter in MIXERS)
        return [(f"{_of_mixer(letter)}*.", count, moe) for letter, count in counted if count]
    linear = model.linear_layers(0, model.num_layers)
    if model.full_attention is not None:  # all layers have experts, or none
        full = model.layers_with_full_heads(0, model.num_layers)
        counts = ((WINDOW, model.num_layers - full), (FULL, full))
        return [(prefix + "*.", count, moe) for prefix, count in counts if count]
    if linear:  # the same
        full = model.num_layers - linear
        return [(LINEAR + "*.", linear, moe), *([(FULL + "*.", full, moe)] if full else [])]
    if moe is None:
        return [("layers.*.", model.num_layers, None)]
    dense = model.num_layers - model.layers_with_experts(0, model.num_layers)
    if dense == 0:
        return [("layers.*.", model.num_layers, moe)]
    if dense == model.num_layers:
        return [("layers.*.", model.num_layers, None)]
    return [(DENSE + "*.", dense, None), (MOE + "*.", model.num_layers - dense, moe)]


def _of_mixer(letter: str) -> str:
    """Return the prefix of the modules of layers with this letter."""
    return f"layers.{MIXERS[letter]}."


def layer_prefixes(model: ModelSpec, layers: Iterable[int]) -> tuple[str, ...]:
    """Return the prefix of the modules of some layers in the parameter table.

    Args:
        model: the model.
        layers: their numbers, in order.

    Returns:
        one prefix for each; empty if all layers of the model have the same modules.
    """
    if len(_layer_kinds(model)) == 1:
        return ()
    return tuple(prefix_of(model, layer) for layer in layers)


def prefix_of(model: ModelSpec, layer: int) -> str:
    """Return the prefix of one layer's modules, where layers differ."""
    if model.layer_pattern:
        return _of_mixer(model.mixer(layer))
    if model.linear_attention is not None:
        return LINEAR if model.is_linear(layer) else FULL
    if model.full_attention is not None:
        return FULL if model.has_full_heads(layer) else WINDOW
    return MOE if model.has_experts(layer) else DENSE


def layers_by_prefix(model: ModelSpec, spans: Iterable[tuple[int, int]]) -> dict[str, int]:
    """Return the number of layers of each prefix among spans of layers [lo, hi)."""
    if model.layer_pattern:
        here = "".join(model.mixers[lo:hi] for lo, hi in spans)
        return {_of_mixer(letter): here.count(letter) for letter in MIXERS}
    found = {LINEAR: 0, WINDOW: 0, FULL: 0, DENSE: 0, MOE: 0}
    for lo, hi in spans:
        linear, experts = model.linear_layers(lo, hi), model.layers_with_experts(lo, hi)
        windows = 0 if model.full_attention is None else hi - lo - model.layers_with_full_heads(lo, hi)
        found[FULL] += hi - lo - linear - windows
        for prefix, count in ((LINEAR, linear), (WINDOW, windows), (MOE, experts), (DENSE, hi - lo - experts)):
            found[prefix] += count
    return found


def _add_embedding(rows: list[Parameter], model: ModelSpec) -> None:
    part = _Part(rows, "embedding")
    d = ("d", model.hidden_size)
    d_e = _embedding_axis(model)
    part.tensor("embed_tokens", "weight", (("V", model.vocab_size), d_e), "vocab")
    if model.position_embedding == "learned":
        offset = model.position_embedding_offset
        positions = model.max_position_embeddings + offset
        part.tensor("embed_positions", "weight", ((f"S+{offset}" if offset else "S", positions), d), "replicated")
    if d_e != d:
        part.linear("project_in", d, d_e, "replicated")
    if model.embedding_norm:
        part.norm("embed_norm", d, model)


def _add_layer(layer: _Part, model: ModelSpec, moe: MoeSpec | None) -> None:
    d = ("d", model.hidden_size)
    before = model.norm_placement == "before" or model.norms_per_layer == 4
    if before:
        layer.norm("input_norm", d, model)
    if model.layer_pattern:
        _add_mixer(layer, model, moe)
        return
    if model.linear_attention is not None and layer.prefix.startswith(LINEAR):
        _add_linear_attention(layer, d, model.linear_attention)
    elif model.full_attention is not None and layer.prefix.startswith(FULL):
        _add_full_attention(layer, model, model.full_attention)
    elif model.mla is None:
        _add_attention(layer, model)
    else:
        _add_latent_attention(layer, model, model.mla)
    if model.norms_per_layer == 4 or not before:
        layer.norm("attention_output_norm", d, model)
    if model.norms_per_layer > 1 and before:
        layer.norm("post_attention_norm", d, model)
    if moe is None or moe.dense_mlp:
        _add_mlp(layer, model, "mlp.", d, _mlp_axis(model))
    if moe is not None:
        _add_experts(layer, model, moe)
    if model.norms_per_layer == 4 or not before:
        layer.norm("mlp_output_norm", d, model)


def _add_mixer(layer: _Part, model: ModelSpec, moe: MoeSpec | None) -> None:
    """Add the single module of a layer, which its prefix names."""
    d = ("d", model.hidden_size)
    if layer.prefix.startswith(_of_mixer(MAMBA)):
        assert model.mamba is not None
        _add_mamba(layer, d, model.mamba)
    elif layer.prefix.startswith(_of_mixer(ATTENTION)):
        _add_attention(layer, model)
    elif layer.prefix.startswith(_of_mixer(MLP)):
        _add_mlp(layer, model, "mlp.", d, _mlp_axis(model))
    else:
        assert moe is not None
        _add_experts(layer, model, moe)


def _add_mamba(layer: _Part, d: Axis, mamba: MambaSpec) -> None:
    """Add Mamba-2 (arXiv 2405.21060), as transformers 5.23 models/nemotron_h/modeling_nemotron_h.py registers it."""
    heads, inner = ("h_m", mamba.num_heads), ("d_m", mamba.inner_size)
    channels = ("d_conv", mamba.conv_size)
    layer.tensor("mamba.dt", "bias", (heads,), "replicated")
    layer.tensor("mamba.A_log", "weight", (heads,), "replicated")
    layer.tensor("mamba.D", "weight", (heads,), "replicated")
    layer.tensor("mamba.conv1d", "weight", (channels, ("1", 1), ("w_c", mamba.conv_kernel)), "replicated")
    if mamba.conv_bias:
        layer.tensor("mamba.conv1d", "bias", (channels,), "replicated")
    projected = ("d_in", inner[1] + channels[1] + heads[1])
    layer.linear("mamba.in_proj", projected, d, "replicated", bias=mamba.projection_bias)
    layer.tensor("mamba.norm", "weight", (inner,), "replicated")
    layer.linear("mamba.out_proj", d, inner, "replicated", bias=mamba.projection_bias)


def _add_attention(layer: _Part, model: ModelSpec) -> None:
    d = ("d", model.hidden_size)
    query, key_value = model.query_size, model.key_value_size
    q = d if query == model.hidden_size else ("h·d_h", query)
    kv = q if key_value == query else ("h_kv·d_h", key_value)
    if model.fused_qkv:
        symbol = "3·d" if kv == d else "(h+2·h_kv)·d_h"
        layer.linear("attention.qkv_proj", (symbol, query + 2 * key_value), d, "column", bias=model.qkv_bias)
    else:
        gated = ("2·h·d_h", 2 * query) if model.attention_gate else q
        layer.linear("attention.q_proj", gated, d, "column", bias=model.qkv_bias)
        layer.linear("attention.k_proj", kv, d, "column", bias=model.qkv_bias)
        layer.linear("attention.v_proj", kv, d, "column", bias=model.qkv_bias)
    if model.qk_norm and model.qk_norm_weight:
        for name, heads in (("attention.q_norm", q), ("attention.k_norm", kv)):
            if model.qk_norm_width == "head":
                layer.norm(name, ("d_h", model.head_dim), model)
            elif model.qk_norm_width == "all-heads":
                layer.norm(name, heads, model, "column")
            elif model.norm_weight:
                layer.tensor(name, "weight", (heads,), "column")
    if model.attention_sinks:
        layer.tensor("attention.sinks", "weight", (("h", model.num_attention_heads),), "column")
    layer.linear("attention.o_proj", d, q, "row", bias=model.output_bias)


def _add_full_attention(layer: _Part, model: ModelSpec, full: FullAttentionSpec) -> None:
    """Add attention with separate sizes of heads (transformers 5.23 models/gemma4/modeling_gemma4.py)."""
    d = ("d", model.hidden_size)
    q = ("h·d_hf", model.num_attention_heads * full.head_dim)
    kv = ("h_kvf·d_hf", full.num_key_value_heads * full.head_dim)
    layer.linear("attention.q_proj", q, d, "column", bias=model.qkv_bias)
    for name in ("k",) if full.keys_as_values else ("k", "v"):
        layer.linear(f"attention.{name}_proj", kv, d, "column", bias=model.qkv_bias)
    for name in ("q", "k") if model.qk_norm and model.qk_norm_weight else ():
        layer.norm(f"attention.{name}_norm", ("d_hf", full.head_dim), model)
    layer.linear("attention.o_proj", d, q, "row", bias=model.output_bias)


def _add_linear_attention(layer: _Part, d: Axis, linear: LinearAttentionSpec) -> None:
    """Add Gated DeltaNet (arXiv 2412.06464), as transformers 5.23 models/qwen3_5/modeling_qwen3_5.py registers it."""
    heads = ("h_lv", linear.num_value_heads)
    mixed, values = ("d_mix", 2 * linear.key_size + linear.value_size), ("h_lv·d_lv", linear.value_size)
    layer.tensor("linear_attn.dt", "bias", (heads,), "replicated")
    layer.tensor("linear_attn.A_log", "weight", (heads,), "replicated")
    layer.tensor("linear_attn.conv1d", "weight", (mixed, ("1", 1), ("w_c", linear.conv_kernel)), "replicated")
    layer.tensor("linear_attn.norm", "weight", (("d_lv", linear.value_head_dim),), "replicated")
    layer.linear("linear_attn.out_proj", d, values, "replicated")
    if linear.fused_projections:
        layer.linear("linear_attn.in_proj_qkvz", ("d_mix+h_lv·d_lv", mixed[1] + values[1]), d, "replicated")
        layer.linear("linear_attn.in_proj_ba", ("2·h_lv", 2 * heads[1]), d, "replicated")
    else:
        for name, out in (("qkv", mixed), ("z", values), ("b", heads), ("a", heads)):
            layer.linear(f"linear_attn.in_proj_{name}", out, d, "replicated")


def _add_latent_attention(layer: _Part, model: ModelSpec, mla: MlaSpec) -> None:
    """Add multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank keys and values, optionally queries."""
    d = ("d", model.hidden_size)
    heads = model.num_attention_heads
    query = ("h·(d_n+d_r)", heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim))
    if mla.q_lora_rank:
        r_q = ("r_q", mla.q_lora_rank)
        layer.linear("attention.q_a_proj", r_q, d, "replicated", bias=model.qkv_bias)
        layer.norm("attention.q_a_norm", r_q, model)
        layer.linear("attention.q_b_proj", query, r_q, "column")
    else:
        layer.linear("attention.q_proj", query, d, "column")
    r_kv = ("r_kv", mla.kv_lora_rank)
    # The rotary part of the key is shared by all heads and not compressed.
    latent = ("r_kv+d_r", mla.kv_lora_rank + mla.qk_rope_head_dim)
    layer.linear("attention.kv_a_proj", latent, d, "replicated", bias=model.qkv_bias)
    layer.norm("attention.kv_a_norm", r_kv, model)
    key_value = ("h·(d_n+d_v)", heads * (mla.qk_nope_head_dim + mla.v_head_dim))
    layer.linear("attention.kv_b_proj", key_value, r_kv, "column")
    layer.linear("attention.o_proj", d, ("h·d_v", heads * mla.v_head_dim), "row", bias=model.output_bias)


def _add_mlp(layer: _Part, model: ModelSpec, prefix: str, d: Axis, width: Axis) -> None:
    symbol, size = width
    if model.gated_mlp and model.fused_gate_up:
        layer.linear(prefix + "gate_up_proj", (f"2·{symbol}", 2 * size), d, "column", bias=model.mlp_bias)
    else:
        if model.gated_mlp:
            layer.linear(prefix + "gate_proj", width, d, "column", bias=model.mlp_bias)
        layer.linear(prefix + "up_proj", width, d, "column", bias=model.mlp_bias)
        for name in ("alpha_p", "alpha_n") if model.mlp == "xielu" else ():  # XIELUActivation of transformers
            layer.tensor(f"{prefix}act_fn.{name}", "weight", (("1", 1),), "replicated")
    layer.linear(prefix + "down_proj", d, width, "row", bias=model.mlp_bias)


def _add_experts(layer: _Part, model: ModelSpec, moe: MoeSpec) -> None:
    d = ("d", model.hidden_size)
    experts = ("E", moe.num_experts)
    width = ("F_e", moe.expert_intermediate_size)
    layer.tensor("mlp.router", "weight", (experts, d), "replicated")
    if moe.dense_mlp:  # Gemma4TextRouter and Gemma4TextDecoderLayer
        layer.tensor("mlp.router_scale", "weight", (d,), "replicated")
        layer.tensor("mlp.expert_scales", "weight", (experts,), "replicated")
        for name in ("mlp.dense_output_norm", "mlp.experts_input_norm", "mlp.experts_output_norm"):
            layer.norm(name, d, model)
    if moe.router_bias:
        layer.tensor("mlp.router", "bias", (experts,), "replicated")
    # transformers stacks the experts: one tensor for all gate and up projections, one for all down projections.
    up, up_out = ("gate_up_proj", ("2·F_e", 2 * width[1])) if model.gated_mlp else ("up_proj", width)
    inner = ("d_l", moe.latent_size) if moe.latent_size else d
    layer.tensor(f"mlp.experts.{up}", "weight", (experts, up_out, inner), "expert")
    if model.experts_have_bias:
        layer.tensor(f"mlp.experts.{up}", "bias", (experts, up_out), "expert")
    layer.tensor("mlp.experts.down_proj", "weight", (experts, inner, width), "expert")
    if model.experts_have_bias:
        layer.tensor("mlp.experts.down_proj", "bias", (experts, inner), "expert")
    if moe.shared_expert_intermediate_size:
        _add_mlp(layer, model, "mlp.shared_experts.", d, ("F_s", moe.shared_expert_intermediate_size))
        if moe.shared_expert_gate:
            layer.tensor("mlp.shared_expert_gate", "weight", (("1", 1), d), "replicated")
    if moe.latent_size:
        layer.linear("mlp.fc1_latent_proj", inner, d, "replicated", bias=model.mlp_bias)
        layer.linear("mlp.fc2_latent_proj", d, inner, "replicated", bias=model.mlp_bias)


def _add_head(rows: list[Parameter], model: ModelSpec) -> None:
    part = _Part(rows, "head")
    d = ("d", model.hidden_size)
    d_e = _embedding_axis(model)
    vocabulary = ("V", model.vocab_size)
    if model.final_norm:
        part.norm("norm", d, model)
    if d_e != d:
        part.linear("project_out", d_e, d, "replicated")
    if model.num_labels:  # transformers' ForSequenceClassification
        part.tensor("score", "weight", (("n_l", model.num_labels), d_e), "replicated")
    elif not model.tie_word_embeddings:
        part.tensor("lm_head", "weight", (vocabulary, d_e), "vocab")
    if model.lm_head_bias:
        part.tensor("lm_head", "bias", (vocabulary,), "vocab")


def _embedding_axis(model: ModelSpec) -> Axis:
    own = model.embedding_size != model.hidden_size
    return ("d_e", model.embedding_size) if own else ("d", model.hidden_size)


def _mlp_axis(model: ModelSpec) -> Axis:
    # Writing the papers' 4·d lets reports show 12·d² without another symbol.
    usual = model.intermediate_size == 4 * model.hidden_size
    return ("4·d" if usual else "F", model.intermediate_size)
