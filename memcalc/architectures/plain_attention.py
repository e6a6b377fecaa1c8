"""Attention of the reference decoder: projections, and the core as separate operators or as a fused kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.architectures.kv_cache import cached, cached_attention
from memcalc.architectures.norms import norm
from memcalc.architectures.plain_base import PlainModule
from memcalc.programs.tape import Shape, Tensor

if TYPE_CHECKING:
    from memcalc.architectures.plain import PlainBlock


class PlainAttention(PlainModule):
    """Writer of the attention module of a layer."""

    def output(self, x: Tensor) -> Tensor:
        """Projection, core, output projection."""
        x = self.split.module_input(x, "attention")
        if self.c.projections.mla:
            return latent_attention(self.layer, x)
        c, ops = self.c, self.ops
        h, kv = self.axis("h"), self.axis("h_kv")
        by_head: tuple[Shape, Shape, Shape] = (("b", "s", h, "d_h"), ("b", "s", kv, "d_h"), ("b", "s", kv, "d_h"))
        shapes = by_head
        if c.projections.qk_norm == "all-heads":
            q_width, kv_width = self.axis(c.attention.query_width), self.axis("h_kv·d_h")
            shapes = (("b", "s", q_width), ("b", "s", kv_width), by_head[2])
        q, k, v = self.projected(x, shapes)
        if c.attention.sinks:
            ops.unwritten_parameter("attention.sinks", "weight", (h,))
        if c.projections.qk_norm:
            v = self.restrided(v, "v") if self.sums_shared_heads or c.attention.kernel == "eager" else v
            projected = (q, k)
            q = self.head_norm(q, "attention.q_norm", self.axis(c.attention.query_width), by_head[0])
            if c.projections.qk_norm == "all-heads" and (c.attention.kernel == "eager" or c.attention.pads_heads):
                q = ops.restrided_view(q, "q")
            k = self.head_norm(k, "attention.k_norm", self.axis("h_kv·d_h"), by_head[1])
            if c.projections.qk_norm == "all-heads":
                k = self.keys_by_head(k)
            self.tape.still_referenced(*projected)
        else:
            q, k, v = self.by_head(q, k, v)
        if (
            not c.projections.qk_norm
            and c.position.kind == "rope"
            and c.projections.fused
            and not c.attention.heads_first
        ):
            v = ops.copy(v, "v")
        if c.position.kind == "rope":
            straight = (q, k)
            q, k = self.rotated(q, "q"), self.rotated(k, "k")
            self.tape.still_referenced(*straight)
        if c.cache is not None:
            k, v = cached(ops, c.cache, k, v)
        core = self.eager_core(q, k, v) if c.attention.kernel == "eager" else self.fused_core(q, k, v)
        if c.saving.selective:
            self.tape.recompute(core, (q, k, v))
        eager, by_token = c.attention.kernel == "eager", core
        # The flash kernel's output has the layout of queries (at::empty_like), the memory-efficient one's is by token.
        heads_first = c.attention.heads_first and c.attention.kernel == "flash"
        if eager or c.attention.pads_heads or c.attention.rotation or heads_first:
            by_token = ops.copy(core, "attention output by token", reorders=eager)
        query_width = self.axis(c.attention.query_width)
        out = self.split.row(by_token, "attention.o_proj", ("d", query_width), bias=c.projections.output_bias)
        self.split.returned(x, q, k, v, core)
        return out

    def projected(self, x: Tensor, shapes: tuple[Shape, Shape, Shape]) -> tuple[Tensor, ...]:
        """Queries, keys and values: views of one linear layer's output, or three linear layers with adapters."""
        c, ops = self.c, self.ops
        if c.projections.fused:
            width = self.axis(c.attention.qkv_width)
            qkv = self.split.column(x, "attention.qkv_proj", (width, "d"), ("b", "s", width), bias=c.projections.bias)
            return ops.split(qkv, shapes, "q, k, v")
        query = self.axis(c.attention.query_width)
        widths = (query, *(query if not c.attention.grouped else self.axis("h_kv·d_h"),) * 2)
        return tuple(
            self.split.column(x, f"attention.{name}_proj", (width, "d"), shape, bias=c.projections.bias)
            for name, width, shape in zip("qkv", widths, shapes, strict=True)
        )

    def by_head(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v split into heads, with copies of gradients where strides differ.

        Matmuls per head, and padding, give such gradients. The gradient of k needs no copy where its matmul gives it
        the layout of q: heads are contiguous within each token's stride.
        """
        c = self.c
        if self.sums_shared_heads:
            v = self.restrided(v, "v")
            return q, self.restrided(k, "k"), v
        if c.attention.kernel != "eager" and not c.attention.pads_heads:
            return q, k, v
        v, q = self.restrided(v, "v"), self.restrided(q, "q")
        return q, self.keys_by_head(k), v

    def keys_by_head(self, k: Tensor) -> Tensor:
        """Keys split into heads, as in `by_head`."""
        c = self.c
        copied = (
            self.sums_shared_heads or c.attention.pads_heads or (c.attention.kernel == "eager" and c.attention.grouped)
        )
        return self.restrided(k, "k") if copied else k

    def restrided(self, x: Tensor, name: str) -> Tensor:
        """q, k or v split into heads, with a copy of its gradient; a single head has the same layout either way."""
        return x if self.c.attention.single_key_head and name != "q" else self.ops.restrided_view(x, name)

    @property
    def sums_shared_heads(self) -> bool:
        """Whether the kernel gets keys and values per query head, so their gradients are sums over query heads."""
        return (
            self.c.attention.kernel == "memory-efficient" and self.c.attention.grouped
        ) or self.c.attention.repeats_heads

    def head_norm(self, heads: Tensor, module: str, width: str, out: Shape) -> Tensor:
        """A norm of query or key heads, with `width` features together."""
        c = self.c
        if c.projections.qk_norm == "all-heads":
            return norm(self.ops, c.norm, heads, module, width, weight=c.projections.qk_norm_weight, out=out)
        if c.projections.qk_norm == "head":
            return norm(self.ops, c.norm, heads, module, "d_h", weight=c.projections.qk_norm_weight)
        if not c.projections.qk_norm_weight or not c.norm.weight:
            return norm(self.ops, c.norm, heads, module, "d_h", weight=False)
        normed = norm(self.ops, c.norm, heads, module, "d_h", weight=False, out=("b", "s", width))
        return self.ops.times_weight(normed, module, width, out)

    def rotated(self, x: Tensor, name: str) -> Tensor:
        """x * cos + (-second half, first half) * sin; all layers share the cos/sin cache."""
        ops = self.ops
        half = (*x.shape[:-1], "d_h/2")
        first, second = ops.split(x, (half, half), f"{name} halves")
        table = Tensor(-1, ("s", "d_h"), self.c.dtypes.compute)
        straight = ops.scale(x, f"{name} * cos")
        self.tape.also_saves(table)
        self.tape.reads("cosines")
        turned = ops.concatenate((ops.scale(second, f"-{name} half"), first), x.shape, f"turned {name}")
        by_sines = ops.scale(turned, f"turned {name} * sin")
        self.tape.also_saves(table)
        self.tape.reads("sines")
        return ops.add(straight, by_sines, f"rotated {name}")

    def eager_core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """softmax(q k^T * scale) v as separate operators."""
        c, ops = self.c, self.ops
        h = self.axis("h")
        heads, keys = ("b", "s", h, "d_h"), ("b", c.keys, h, "d_h")
        scores_shape = ("b", h, "s", c.keys)
        if c.attention.grouped:
            k, v = ops.copy(k, "k for each head", keys), ops.copy(v, "v for each head", keys)
        copies = ("q by head", "" if c.attention.grouped else "k by head")  # bmm needs each head's matrix contiguous
        scores = ops.matmul(q, k, "scores", scores_shape, copies if c.batched else ("", ""))
        scores = ops.scale(scores, "scaled scores")
        if c.position.kind == "alibi":
            scores = ops.shift(scores, "biased scores")
        scores = ops.scale(scores, "masked scores")
        self.tape.also_saves(Tensor(-1, ("s", c.keys), "bool"))
        self.tape.reads("causal mask")
        if c.implementation == "huggingface" and c.attention.sinks:  # gpt-oss: one column more, in the scores' dtype
            given = scores
            scores = ops.shift(ops.copy(scores, "scores and sinks"), "scores less their maximum")
            probabilities = ops.softmax(scores, "attention probabilities")
            self.tape.still_referenced(given)
            self.layer.weights = (probabilities,)
        elif c.implementation == "huggingface":  # softmax(..., dtype=torch.float32).to(query.dtype)
            wide = ops.softmax(scores, "attention probabilities in fp32", "fp32")
            probabilities = ops.cast(wide, q.dtype, "attention probabilities")
            self.layer.weights = (probabilities,)
        else:
            probabilities = ops.softmax(scores, "attention probabilities")
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention.dropout)
        copies = ("", "v by head" if c.batched and not c.attention.grouped else "")
        attended = ops.matmul(dropped, v, "attention output", heads, copies)
        self.tape.still_referenced(k, v, scores, probabilities, dropped)
        return attended

    def fused_core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Fused attention; grouped heads are expanded for the memory-efficient kernel, or by the module."""
        c, ops = self.c, self.ops
        h, kv = self.axis("h"), self.axis("h_kv")
        if c.cache is not None:
            return cached_attention(ops, c, q, k, v, (h, kv, "d_h"))
        if c.attention.repeats_heads or (c.attention.grouped and c.attention.kernel != "flash"):
            heads, kv = ("b", "s", h, "d_h"), h
            k, v = ops.copy(k, "k for each head", heads), ops.copy(v, "v for each head", heads)
        if c.attention.rotation:
            return ops.ring_attention(q, k, v, h, kv, "d_h", c.attention.rotation)
        if c.attention.pads_heads:
            return ops.padded_flash_attention(q, k, v, h, kv, "s", splits=not c.attention.dropout)
        if c.attention.kernel == "flash":
            return ops.flash_attention(q, k, v, h, kv, "d_h", "s", splits=not c.attention.dropout)
        return ops.efficient_attention(q, k, v, h, "d_h", "s")


def latent_attention(layer: PlainBlock, x: Tensor) -> Tensor:
    """DeepSeek-V2's latent attention (arXiv 2405.04434) as in training, without absorbed weights."""
    c, ops = layer.c, layer.ops
    h = layer.axis("h")
    tokens = ("b", "s")
    q_width = layer.axis("h·(d_n+d_r)")
    if c.projections.query_latent:
        latent = ops.linear(x, "attention.q_a_proj", ("r_q", "d"), (*tokens, "r_q"), bias=c.projections.bias)
        latent = norm(ops, c.norm, latent, "attention.q_a_norm", "r_q")
        q = layer.split.column(latent, "attention.q_b_proj", (q_width, "r_q"), (*tokens, h, "d_n+d_r"), bias=False)
    else:
        q = layer.split.column(x, "attention.q_proj", (q_width, "d"), (*tokens, h, "d_n+d_r"), bias=False)
    joint = ops.linear(x, "attention.kv_a_proj", ("r_kv+d_r", "d"), (*tokens, "r_kv+d_r"), bias=c.projections.bias)
    compressed, key_position = ops.split(joint, ((*tokens, "r_kv"), (*tokens, "d_r")), "latents")
    compressed = norm(ops, c.norm, compressed, "attention.kv_a_norm", "r_kv")
    kv_width = layer.axis("h·(d_n+d_v)")
    if c.cache is not None:
        compressed, key_position = cached(ops, c.cache, compressed, key_position)
    read = ("b", c.keys)
    out = (*read, h, "d_n+d_v")
    kv = layer.split.column(compressed, "attention.kv_b_proj", (kv_width, "r_kv"), out, bias=False)
    key, value = ops.split(kv, ((*read, h, "d_n"), (*read, h, "d_v")), "keys and values")
    plain, position = ops.split(q, ((*tokens, h, "d_n"), (*tokens, h, "d_r")), "query parts")
    q = ops.concatenate((plain, ops.scale(position, "rotated q")), (*tokens, h, "d_n+d_r"), "q")
    k = ops.concatenate((key, ops.scale(key_position, "rotated k")), (*read, h, "d_n+d_r"), "k")
    if c.attention.kernel == "eager":
        scores = ops.scale(ops.matmul(q, k, "scores", ("b", h, "s", c.keys)), "scaled scores")
        probabilities = ops.softmax(ops.scale(scores, "masked scores"), "attention probabilities")
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention.dropout)
        core = ops.copy(ops.matmul(dropped, value, "attention output", (*tokens, h, "d_v")), "output by token")
    elif c.cache is not None:
        core = cached_attention(ops, c, q, k, value, (h, h, "d_n+d_r"), (*tokens, h, "d_v"))
    else:
        core = ops.flash_attention(q, k, value, h, h, "d_n+d_r", "s", out=(*tokens, h, "d_v"))
    if c.saving.selective:
        layer.tape.recompute(core, (q, k, value))
    out_width = layer.axis("h·d_v")
    return layer.split.row(core, "attention.o_proj", ("d", out_width), bias=c.projections.output_bias)
