"""Llama, and the families that copy its layer."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.estimation.blocks.caching import cached
from memcalc.estimation.blocks.huggingface.mlp import Mlps
from memcalc.estimation.blocks.huggingface.rotary import Rotary
from memcalc.estimation.tape import Tensor


class Llama(Rotary, Mlps):
    """LlamaDecoderLayer and the families that copy it (mistral, qwen2, qwen3)."""

    norms_heads_last = False  # when q, k and v have all been projected

    def layer(self) -> Tensor:
        """Attention, then the MLP, each after its norm."""
        x = self.residual(self.entry(), "input_norm", self.attention, "attention sum")
        return self.residual(x, "post_attention_norm", self.mlp, "layer output")

    def residual(self, x: Tensor, norm: str, branch: Callable[[Tensor], Tensor], total: str) -> Tensor:
        """x + branch(norm(x)), the norm's output being hidden_states until the branch returns."""
        normed = self.norm(x, norm, "d")
        made = branch(normed)
        self.tape.still_named(normed)
        return self.ops.add(x, self.branch_output(made, total), total)

    def branch_output(self, x: Tensor, total: str) -> Tensor:  # noqa: ARG002
        """What becomes of a branch's output before its sum: dropout, a multiplier."""
        return x

    def attention(self, x: Tensor) -> Tensor:
        """LlamaAttention.forward."""
        c, ops = self.c, self.ops
        q, k, v = self.queries_keys_values(x)
        if c.cache is not None:
            k, v = cached(ops, c.cache, k, v)
        core = self.core(q, k, v)
        width = "d" if c.square else "h·d_h"
        y = ops.linear(core, "attention.o_proj", ("d", width), ("b", "s", "d"), bias=c.output_bias)
        self.tape.still_named(q, k, v)
        return y

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projected, normed where the config says so, and turned."""
        parts = self.projected(x)
        if self.norms_heads_last:
            parts |= {name: self.head_norm(parts[name], name) for name in ("q", "k")}
        q, k = (self.rotated(parts[name], name) for name in ("q", "k"))
        self.tape.still_named(parts["q"], parts["k"])
        return q, k, parts["v"]

    def projected(self, x: Tensor) -> dict[str, Tensor]:
        """q, k and v, each of a matrix of its own, and normed as they come."""
        c, ops = self.c, self.ops
        q_width = "d" if c.square else "h·d_h"
        kv_width = q_width if not c.grouped else "h_kv·d_h"
        kv_heads = "h_kv" if c.grouped else "h"
        parts = {}
        for name, width, heads in (("q", q_width, "h"), ("k", kv_width, kv_heads), ("v", kv_width, kv_heads)):
            out = ("b", "s", heads, "d_h")
            parts[name] = ops.linear(x, f"attention.{name}_proj", (width, "d"), out, bias=c.qkv_bias)
            if c.attention == "eager":
                parts[name] = ops.seen(parts[name], name)
            if name != "v" and not self.norms_heads_last:
                parts[name] = self.head_norm(parts[name], name)
        return parts

    def head_norm(self, x: Tensor, name: str) -> Tensor:
        """Qwen3Attention: a norm of each query head and key head, where the config says so."""
        return self.norm(x, f"attention.{name}_norm", "d_h") if self.c.qk_norm else x

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention function of the config."""
        if self.c.attention == "eager":
            return self.eager(q, k, v, softmax_in_fp32=True)
        return self.scaled_dot_product(q, k, v)
