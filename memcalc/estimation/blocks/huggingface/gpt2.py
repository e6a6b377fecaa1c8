"""GPT-2: learned positions, one matrix for q, k and v, weights that lie transposed."""

from __future__ import annotations

from memcalc.estimation.blocks.caching import cached
from memcalc.estimation.blocks.huggingface.mlp import Mlps
from memcalc.estimation.tape import Tensor


class Gpt2(Mlps):
    """GPT2Block."""

    rotates = False

    def layer(self) -> Tensor:
        """Attention, then the MLP, each after its norm."""
        c, ops = self.c, self.ops
        x = self.entry()
        normed = ops.layer_norm(x, "input_norm", "d")
        qkv = ops.linear(normed, "attention.qkv_proj", ("3·d", "d"), ("b", "s", "3·d"), bias=True, conv1d=True)
        heads = ("b", "s", "h", "d_h")
        q, k, v = ops.split(qkv, (heads, heads, heads), "q, k, v")
        if c.cache is not None:
            k, v = cached(ops, c.cache, k, v)
        if c.attention == "eager":  # gradients come head by head; that of k transposed, which is a view of rows
            v, q = ops.seen(v, "v"), ops.seen(q, "q")
        core = (
            self.eager(q, k, v, softmax_in_fp32=False) if c.attention == "eager" else self.scaled_dot_product(q, k, v)
        )
        attended = ops.linear(core, "attention.o_proj", ("d", "d"), ("b", "s", "d"), bias=True, conv1d=True)
        attended = ops.dropout(attended, "attention dropout", c.residual_dropout)
        self.tape.still_named(normed, q, k, v)
        x = ops.add(attended, x, "attention sum")
        normed = ops.layer_norm(x, "post_attention_norm", "d")
        inner = "4·d" if c.usual_width else "F"
        up = ops.linear(normed, "mlp.up_proj", (inner, "d"), ("b", "s", inner), bias=True, conv1d=True)
        down = ops.linear(self.act(up, "mlp."), "mlp.down_proj", ("d", inner), ("b", "s", "d"), bias=True, conv1d=True)
        fed = ops.dropout(down, "mlp dropout", c.residual_dropout)
        output = ops.add(x, fed, "layer output")
        self.tape.still_named(normed, attended)
        return output
