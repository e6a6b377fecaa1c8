"""Falcon: matrices that are transposed before they are multiplied, and a mask in every attention."""

from __future__ import annotations

from memcalc.estimation.blocks.huggingface.mlp import Mlps
from memcalc.estimation.blocks.huggingface.rotary import Rotary
from memcalc.estimation.blocks.structure import Structure
from memcalc.estimation.tape import Shape, Tensor


class Falcon(Rotary, Mlps):
    """FalconDecoderLayer: of rotary models without biases, attending eagerly."""

    names_returned = True

    @classmethod
    def is_written(cls, c: Structure) -> bool:
        """Of sdpa, which always has a mask, and of ALiBi, biases and MLPs that follow attention steps are traced."""
        return c.attention == "eager" and c.position == "rope" and c.parallel_block and not c.qkv_bias

    @property
    def new_architecture(self) -> bool:
        """Falcon-40B's: groups of heads, and two norms side by side."""
        c = self.c
        return c.norms_per_layer == 2 or (c.grouped and not c.one_key_head)

    def layer(self) -> Tensor:
        """Attention and the MLP side by side, of one norm or of one each."""
        c, ops = self.c, self.ops
        x = self.entry()
        normed = given = self.norm(x, "input_norm", "d")
        if c.norms_per_layer == 2:
            given = self.norm(x, "post_attention_norm", "d")
        attended = self.attention(normed)
        made = self.mlp(given)
        total = ops.add_in_place(made, attended, "mlp output + attention output")
        output = ops.add(x, ops.dropout(total, "mlp dropout", c.residual_dropout), "layer output")
        self.tape.still_named(normed, given, attended, made)
        return output

    def mlp(self, x: Tensor) -> Tensor:
        """FalconMLP."""
        inner = "4·d" if self.c.usual_width else "F"
        up = self.linear(x, "mlp.up_proj", (inner, "d"), ("b", "s", inner))
        return self.linear(self.act(up, "mlp."), "mlp.down_proj", ("d", inner), ("b", "s", "d"))

    def linear(self, x: Tensor, module: str, weight: Shape, out: Shape) -> Tensor:
        """FalconLinear: x @ weight.T. Autocast remembers casts of leaves alone, which a transposed weight is not."""
        region = set(self.tape.region)
        y = self.ops.linear(x, module, weight, out, bias=False)
        if self.c.adapters is None:  # whose own matrices are leaves
            self.tape.region = region
        return y

    def attention(self, x: Tensor) -> Tensor:
        """FalconAttention.forward, whose variables hold the fused product until it returns."""
        c, ops = self.c, self.ops
        shape = ("b", "s", "h", "d_h")
        width = "(h+2·h_kv)·d_h" if c.grouped else "3·d"
        qkv = self.linear(x, "attention.qkv_proj", (width, "d"), ("b", "s", width))
        q, k, v = self.heads(qkv)
        q, k = self.positioned(q, k)
        named = (q, k, v)
        if c.one_key_head:
            k, v = ops.expanded(k, "k for each head", shape), ops.expanded(v, "v for each head", shape)
        if c.batched:
            q, k = ops.copy(q, "q by head"), ops.copy(k, "k by head")
        scores = ops.divide_by_number(ops.matmul(q, k, "scores", ("b", "h", "s", "s")), "scaled scores")
        probabilities = ops.softmax(ops.shift(scores, "masked scores", c.parameters), "attention probabilities")
        self.tape.still_named(scores)
        self.weights = (probabilities,)
        values = ops.copy(v, "v by head") if c.batched else v
        core = ops.matmul(probabilities, values, "attention output", shape)
        by_token = ops.copy(core, "attention output by token", reorders=c.batched)
        y = self.linear(by_token, "attention.o_proj", ("d", "d"), ("b", "s", "d"))
        self.tape.still_named(x, qkv, by_token, *named)
        return y

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """_split_heads: keys and values of fewer heads are indexed, which copies them."""
        c, ops = self.c, self.ops
        shape = ("b", "s", "h", "d_h")
        if not c.grouped and not self.new_architecture:
            q, k, v = ops.slices(qkv, (shape, shape, shape), "q, k, v")
            return q, k, v
        shared = ("b", "s", "h_kv", "d_h")
        (q,) = ops.slices(qkv, (shape,), "q")
        k, v = (ops.one_row(qkv, shared, f"{name} of each group") for name in ("k", "v"))
        if not self.new_architecture:
            return q, k, v
        all_q, all_k, all_v = (ops.copy(x, f"{name} of each head", shape) for x, name in ((q, "q"), (k, "k"), (v, "v")))
        self.tape.still_named(k, v)
        return all_q, all_k, all_v
