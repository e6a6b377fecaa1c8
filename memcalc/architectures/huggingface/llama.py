"""Llama, and families with copies of its layer."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.architectures.huggingface.modules.mlp import Mlps
from memcalc.architectures.huggingface.modules.rotary import Rotary
from memcalc.architectures.kv_cache import cached
from memcalc.operators.fused_lora import AdaptedLayer
from memcalc.programs.tape import Tensor


class Llama(Rotary, Mlps):
    """LlamaDecoderLayer and families that copy it (mistral, qwen2, qwen3)."""

    caches_latents = False  # the cache has what keys and values are projected from
    views_last = False  # q, k and v are split into heads after all three are projected
    norms_heads = "at once"  # or "together" (after q, k and v are projected), or "after positions"
    # The norms before and after a branch; "": none.
    attention_norms: tuple[str, str] = ("input_norm", "")
    mlp_norms: tuple[str, str] = ("post_attention_norm", "")

    def layer(self) -> Tensor:
        """Attention, then the MLP, each with its norms."""
        x = self.residual(self.entry(), self.attention, "attention sum", self.attention_norms)
        return self.residual(x, self.mlp, "layer output", self.mlp_norms)

    def residual(self, x: Tensor, branch: Callable[[Tensor], Tensor], total: str, norms: tuple[str, str]) -> Tensor:
        """x + branch(x), with a norm before the branch, after it, or both.

        The variable hidden_states references the branch's input until it returns, and its output until the norm
        returns.
        """
        before, after = norms
        given = self.norm(x, before, "d") if before else x
        made = branch(given)
        self.tape.still_referenced(given)
        if after:
            normed = self.norm(made, after, "d")
            self.tape.still_referenced(made)
            made = normed
        y = self.ops.add(x, self.before_sum(made, total), total)
        self.tape.still_referenced(made)
        return y

    def before_sum(self, x: Tensor, total: str) -> Tensor:  # noqa: ARG002
        """Return a branch's output as added to the residual: with a multiplier or dropout in some families."""
        return x

    def attention(self, x: Tensor) -> Tensor:
        """LlamaAttention.forward."""
        c, ops = self.c, self.ops
        q, k, v = self.queries_keys_values(x)
        if c.cache is not None and not self.caches_latents:
            k, v = cached(ops, c.cache, k, v)
        core = self.core(q, k, v)
        output = AdaptedLayer("attention.o_proj", ("d", self.core_width), ("b", "s", "d"))
        y = (
            ops.fused_output(core, output)
            if ops.fuses("o")
            else ops.linear(core, *output, bias=c.projections.output_bias)
        )
        y = self.attended(y)
        self.tape.still_referenced(q, k, v)
        return y

    @property
    def sums_shared_heads(self) -> bool:
        """Whether the kernel gets keys and values per query head, so their gradients are sums over query heads."""
        by_query = (
            self.c.attention.kernel in ("memory-efficient", "math")
            or self.c.layer.masked
            or self.c.attention.repeats_heads
        )
        return self.c.attention.grouped and by_query

    @property
    def rotates_by_slices(self) -> bool:
        """Whether gradients of queries and keys are sums of zero tensors with filled slices, contiguous by head."""
        return not self.c.layer.without_rope and not self.c.liger

    @property
    def core_width(self) -> str:
        """Axis of attention's output, all heads together."""
        return self.c.attention.query_width

    def attended(self, x: Tensor) -> Tensor:
        """Return attention's output after its last step."""
        return x

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values: projected, with QK norms if configured, and RoPE."""
        parts = self.projected(x)
        for name in ("q", "k") if self.norms_heads == "together" else ():
            projected, parts[name] = parts[name], self.head_norm(parts[name], name)
            self.tape.still_referenced(projected)
        q, k = self.positioned(parts["q"], parts["k"])
        self.tape.still_referenced(parts["q"], parts["k"])
        if self.norms_heads == "after positions":
            turned = (q, k)
            q = self.head_norm(q, "q")
            self.tape.still_referenced(turned[0])
            k = self.head_norm(k, "k")
            self.tape.still_referenced(turned[1])
        return q, k, parts["v"]

    def projected(self, x: Tensor) -> dict[str, Tensor]:
        """q, k and v from separate linear layers, with QK norms applied to each at once."""
        c, ops = self.c, self.ops
        layers, parts = {}, {}
        for name in ("q", "k", "v"):
            width, heads = self.width_and_heads(name)
            layers[name] = AdaptedLayer(f"attention.{name}_proj", (width, "d"), ("b", "s", heads, "d_h"))
        if ops.fuses("qkv"):
            parts = dict(zip(layers, ops.fused_qkv(x, "attention.qkv", tuple(layers.values())), strict=True))
        for name, layer in layers.items():
            if name not in parts:
                parts[name] = ops.linear(x, *layer, bias=c.projections.bias)
            if not self.views_last:
                parts[name] = self.by_head(parts[name], name)
            if name != "v" and self.norms_heads == "at once":
                parts[name] = self.head_norm(parts[name], name)
        return {name: self.by_head(part, name) for name, part in parts.items()} if self.views_last else parts

    def by_head(self, x: Tensor, name: str) -> Tensor:
        """q, k or v split into heads; the gradient is copied back where it is contiguous by head.

        A single head has the same layout by head and by token.
        """
        if self.c.attention.single_key_head and name != "q":
            return x
        attention = self.c.attention
        strided = self.sums_shared_heads or attention.pads_heads if name == "v" else self.rotates_by_slices
        return self.ops.restrided_view(x, name) if attention.by_matmuls or strided else x

    def width_and_heads(self, name: str) -> tuple[str, str]:
        """Axes of q, k or v."""
        if name == "q" or not self.c.attention.grouped:
            return self.c.attention.query_width, "h"
        return "h_kv·d_h", "h_kv"

    def head_norm(self, x: Tensor, name: str) -> Tensor:
        """Qwen3Attention: QK norms, if configured."""
        return self.norm(x, f"attention.{name}_norm", "d_h") if self.c.projections.qk_norm else x

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention function of the config."""
        if self.c.attention.kernel == "eager":
            return self.eager(q, k, v, softmax_in_fp32=True)
        return self.scaled_dot_product(q, k, v)


class BetweenNorms(Llama):
    """Norms before and after both branches (Gemma 2, GLM-4)."""

    attention_norms = ("input_norm", "attention_output_norm")
    mlp_norms = ("post_attention_norm", "mlp_output_norm")


class NormedAfterPositions(Llama):
    """HunYuanDenseV1Attention: QK norms of rotated queries and keys."""

    norms_heads = "after positions"


class PartialRotary(Llama):
    """Attention that splits queries and keys, rotates one part and joins both; variables reference the parts."""

    always_joins = True
    norms_heads = "together"
    named: tuple[Tensor, ...] = ()  # query_rot and key_rot, and the tensors of which query_pass and key_pass are views

    def joined(self, turned: Tensor, passed: Tensor | None, x: Tensor, name: str) -> Tensor:
        """Both parts in one tensor."""
        self.named += (turned, x)
        return super().joined(turned, passed, x, name)

    @property
    def core_width(self) -> str:
        """Axis of attention's output, all heads together."""
        return self.c.attention.query_width

    def attended(self, x: Tensor) -> Tensor:
        """End of attention: its variables are released."""
        self.tape.still_referenced(*self.named)
        return x
