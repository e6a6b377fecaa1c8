"""Options of attention: its kernel and heads, projections, positions, masks, and the KV cache of generation."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.architectures.options.layers import has_dropout
from memcalc.layout.adapters import keeps_qkv_apart
from memcalc.layout.sequence_sharding import has_ring_attention
from memcalc.layout.weight_layout import split_by_dtensor
from memcalc.spec.hardware.kernels import FLASH_LARGEST_HEAD, kernel_for_heads
from memcalc.spec.layers import fills_windows, has_padding_mask, masks_images, passes_mask, windows_among
from memcalc.spec.spec import Spec

FLASH_HEAD_MULTIPLE = 8  # the flash kernel needs a head_dim that is a multiple of this, and PyTorch pads others


class AttentionOptions(NamedTuple):
    """Kernel and heads of attention in layers of one type."""

    kernel: str
    dropout: bool
    sinks: bool
    grouped: bool  # fewer key/value heads than query heads
    single_key_head: bool  # one key/value head for all query heads of a rank
    square: bool  # h·d_h = d, written d
    pads_heads: bool  # the flash kernel gets a padded head_dim
    repeats_heads: bool  # keys and values are copied for every query head before the flash kernel
    heads_first: bool  # plain attention's output is copied from heads to tokens
    large_heads: bool = False  # sdpa takes no grouped heads of this size, so transformers repeats keys and values
    keys_as_values: bool = False  # one projection makes keys and values
    rotation: str = ""  # how PyTorch's ring attention exchanges keys and values: "ring" or "all-gather"; else ""

    @property
    def by_matmuls(self) -> bool:
        """Whether attention is matmuls per head, so that gradients of q, k and v are contiguous by head."""
        return self.kernel in ("eager", "math")

    @property
    def query_width(self) -> str:
        """The axis of all query heads' features."""
        return "d" if self.square else "h·d_h"

    @property
    def qkv_width(self) -> str:
        """The axis of queries, keys and values in one tensor."""
        return "3·d" if self.square and not self.grouped else "(h+2·h_kv)·d_h"

    def with_mask(self, *, masked: bool) -> AttentionOptions:
        """Return the options of a layer that reads a window mask, or does not.

        With a mask transformers repeats keys and values, so the memory-efficient kernel supports them.
        """
        repeated = self.kernel == "math" and (masked or not self.grouped)
        return self._replace(kernel="memory-efficient") if repeated else self


def attention_of(spec: Spec) -> AttentionOptions:
    """Return the options of layers with the model's usual heads."""
    model, training = spec.model, spec.training
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    ranks = spec.parallelism.tensor_parallel if split_by_dtensor(spec) else 1
    return AttentionOptions(
        kernel=training.attention,
        dropout=has_dropout(spec, "attention_dropout"),
        sinks=model.attention_sinks,
        grouped=kv_heads != heads,
        single_key_head=kv_heads == ranks < heads,
        square=model.query_size == model.hidden_size,
        pads_heads=training.attention == "flash" and model.head_dim % FLASH_HEAD_MULTIPLE > 0,
        repeats_heads=training.repeat_kv and kv_heads != heads,
        heads_first=training.heads_first,
        rotation=spec.parallelism.context_parallel_method if has_ring_attention(spec) else "",
    )


def full_attention_of(spec: Spec) -> AttentionOptions | None:
    """Return the options of layers with the heads of `full_attention`; None if the model has none."""
    full, heads = spec.model.full_attention, spec.model.num_attention_heads
    if full is None:
        return None
    return attention_of(spec)._replace(
        kernel=kernel_for_heads(spec.training.attention, full.head_dim),
        grouped=full.num_key_value_heads != heads,
        single_key_head=full.num_key_value_heads == 1 < heads,
        large_heads=full.head_dim > FLASH_LARGEST_HEAD,
        keys_as_values=full.keys_as_values,
    )


class ProjectionOptions(NamedTuple):
    """Linear layers before and after the attention kernel, and norms of their results."""

    fused: bool  # one linear layer for q, k and v
    bias: bool  # of q, k and v
    output_bias: bool
    mla: bool
    query_latent: bool
    qk_norm: str  # features that a norm of queries and keys takes together, as `model.qk_norm_width`; "": no norm
    qk_norm_weight: bool


def projections_of(spec: Spec) -> ProjectionOptions:
    """Return the options of attention's linear layers."""
    model, separate = spec.model, spec.training.implementation == "huggingface" or keeps_qkv_apart(spec)
    return ProjectionOptions(
        fused=model.fused_qkv or not separate,
        bias=model.qkv_bias,
        output_bias=model.output_bias,
        mla=model.mla is not None,
        query_latent=model.mla is not None and model.mla.q_lora_rank > 0,
        qk_norm=model.qk_norm_width if model.qk_norm else "",
        qk_norm_weight=model.qk_norm_weight,
    )


class PositionOptions(NamedTuple):
    """How tokens get their positions."""

    kind: str  # `model.position_embedding`
    partial_rotary: bool  # RoPE on a part of each head
    table: str  # axis of the learned position embedding: "S" or "S+2"


def position_of(spec: Spec) -> PositionOptions:
    """Return the options of positions."""
    model, offset = spec.model, spec.model.position_embedding_offset
    return PositionOptions(
        kind=model.position_embedding,
        partial_rotary=model.position_embedding == "rope" and model.rotary_dim < model.head_dim,
        table=f"S+{offset}" if offset else "S",
    )


class MaskOptions(NamedTuple):
    """Sliding windows of layers, and the masks that the model creates for all of them."""

    window: bool  # one for layers with a window shorter than the sequence
    window_of_sequences: bool  # it is one of each sequence: the program passes a mask of its tokens
    padding: str  # `training.padding_mask`, where layers use it; packed: of several texts in one row
    has_windows: bool  # some layers have a sliding window
    has_full_attention: bool  # some layers have no sliding window


def masks_of(spec: Spec) -> MaskOptions:
    """Return the options of masks."""
    model, theirs = spec.model, spec.training.implementation == "huggingface"
    has_windows, has_full_attention = windows_among(model) if theirs else (False, True)
    return MaskOptions(
        window=theirs and (fills_windows(spec) or (masks_images(model) and has_padding_mask(spec))),
        window_of_sequences=fills_windows(spec) and passes_mask(spec),
        padding=_padding_mask(spec),
        has_windows=has_windows,
        has_full_attention=has_full_attention,
    )


def _padding_mask(spec: Spec) -> str:
    if not has_padding_mask(spec):
        return "none"
    kind = "boolean" if spec.training.padding_mask == "none" else spec.training.padding_mask
    return "packed" if kind == "boolean" and spec.training.padding_free else kind


class LayerKVCache(NamedTuple):
    """KV cache of a layer in one forward of generation.

    Args:
        cache_type: "dynamic", "static" or "paged".
        first: whether the cache is empty before.
        keys: axis of the tokens that attention reads.
        window: whether the layer has a sliding window.
        masked: whether a mask rules out flash attention.
        repeats: whether keys and values are first copied for every query head.
        slides: whether a static window is full and moves by one token.
        passes: whether a static window is shorter than the prompt, which attention then reads unchanged.
        own_positions: whether the program passes position ids of each sequence, as `generate` of transformers does.
    """

    cache_type: str
    first: bool
    keys: str
    window: bool = False
    masked: bool = False
    repeats: bool = False
    slides: bool = False
    passes: bool = False
    own_positions: bool = False

    @property
    def given_masks(self) -> bool:
        """Whether the program passes masks, too: `generate` does with a static cache."""
        return self.own_positions and self.cache_type == "static"
