"""Llama, and the families that copy its layer."""

from __future__ import annotations

from memcalc.estimation.blocks.caching import cached
from memcalc.estimation.blocks.huggingface.family import Family
from memcalc.estimation.tape import Tensor


class Llama(Family):
    """LlamaDecoderLayer and the families that copy it (mistral, qwen2, qwen3)."""

    def layer(self) -> Tensor:
        """Attention, then the MLP, each after its norm."""
        ops = self.ops
        x = self.entry()
        normed = self.rms_norm(x, "input_norm", "d")
        attended = self.attention(normed)
        self.tape.still_named(normed)
        x = ops.add(x, attended, "attention sum")
        normed = self.rms_norm(x, "post_attention_norm", "d")
        fed = self.mlp(normed)
        self.tape.still_named(normed)
        return ops.add(x, fed, "layer output")

    def mlp(self, x: Tensor) -> Tensor:
        """LlamaMLP: down(silu(gate(x)) * up(x))."""
        c, ops = self.c, self.ops
        inner = "4·d" if c.usual_width else "F"
        gate = ops.linear(x, "mlp.gate_proj", (inner, "d"), ("b", "s", inner), bias=c.mlp_bias)
        gate = gate if c.liger else ops.pointwise(gate, "mlp.silu")
        up = ops.linear(x, "mlp.up_proj", (inner, "d"), ("b", "s", inner), bias=c.mlp_bias)
        multiplied = ops.liger_swiglu if c.liger else ops.mul
        product = multiplied(gate, up, "mlp.silu(gate) * up")
        return ops.linear(product, "mlp.down_proj", ("d", inner), ("b", "s", "d"), bias=c.mlp_bias)

    def attention(self, x: Tensor) -> Tensor:
        """LlamaAttention.forward."""
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
            if c.qk_norm and name != "v":
                parts[name] = self.rms_norm(parts[name], f"attention.{name}_norm", "d_h")
        q, k, v = self.rotated(parts["q"], "q"), self.rotated(parts["k"], "k"), parts["v"]
        self.tape.still_named(parts["q"], parts["k"])
        if c.cache is not None:
            k, v = cached(ops, c.cache, k, v)
        core = self.eager(q, k, v, softmax_in_fp32=True) if c.attention == "eager" else self.scaled_dot_product(q, k, v)
        y = ops.linear(core, "attention.o_proj", ("d", q_width), ("b", "s", "d"), bias=c.output_bias)
        self.tape.still_named(q, k, v)
        return y

    def rotated(self, x: Tensor, name: str) -> Tensor:
        """apply_rotary_pos_emb: x * cos + rotate_half(x) * sin."""
        c, ops = self.c, self.ops
        if c.liger:
            return ops.liger_rope(x, name)
        half = (*x.shape[:-1], "d_h/2")
        straight = ops.mul_table(x, f"{name} * cos", c.parameters)
        first, second = ops.slices(x, (half, half), f"{name} halves")
        turned = ops.concatenate((ops.scale(second, f"-{name} half"), first), x.shape, f"turned {name}")
        return ops.add(straight, ops.mul_table(turned, f"turned {name} * sin", c.parameters), f"rotated {name}")
