"""GPT-2: learned positions, one linear layer for q, k and v, transposed weights."""

from __future__ import annotations

from memcalc.architectures.huggingface.modules.mlp import Mlps
from memcalc.architectures.kv_cache import cached
from memcalc.programs.tape import Shape, Tensor


class Gpt2(Mlps):
    """GPT2Block."""

    silent_after: tuple[str, ...] = ("embed_positions", "attention.o_proj", "mlp.down_proj")
    rotates = False
    conv1d = True
    softmax_in_fp32 = False

    def layer(self) -> Tensor:
        """Attention, then the MLP, each after its norm."""
        c, ops = self.c, self.ops
        x = self.entry()
        normed = ops.layer_norm(x, "input_norm", "d")
        attended = self.attention(normed)
        x = ops.add(attended, x, "attention sum")
        self.tape.still_referenced(normed)
        normed = ops.layer_norm(x, "post_attention_norm", "d")
        inner = c.mlp.width
        up = self.linear(normed, "mlp.up_proj", (inner, "d"), ("b", "s", inner))
        down = self.linear(self.act(up, "mlp."), "mlp.down_proj", ("d", inner), ("b", "s", "d"))
        fed = ops.dropout(down, "mlp dropout", c.residual.dropout)
        output = ops.add(x, fed, "layer output")
        self.tape.still_referenced(normed, attended)
        return output

    def linear(self, x: Tensor, module: str, weight: Shape, out: Shape) -> Tensor:
        """A linear layer with a bias."""
        return self.ops.linear(x, module, weight, out, bias=True, conv1d=self.conv1d)

    def attention(self, x: Tensor) -> Tensor:
        """GPT2Attention.forward."""
        c, ops = self.c, self.ops
        q, k, v = self.queries_keys_values(x)
        if c.cache is not None:
            k, v = cached(ops, c.cache, k, v)
        if c.attention.kernel == "eager":
            core = self.eager(q, k, v, softmax_in_fp32=self.softmax_in_fp32)
        else:
            core = self.scaled_dot_product(q, k, v)
        attended = self.linear(core, "attention.o_proj", ("d", "d"), ("b", "s", "d"))
        attended = ops.dropout(attended, "attention dropout", c.residual.dropout)
        self.tape.still_referenced(x, q, k, v)
        return attended

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """c_attn, and the views of its output."""
        ops, heads = self.ops, ("b", "s", "h", "d_h")
        q, k, v = ops.split(
            self.linear(x, "attention.qkv_proj", ("3·d", "d"), ("b", "s", "3·d")), (heads, heads, heads), "q, k, v"
        )
        # gradients of q and v come by head; that of k is transposed, which is a view of rows
        if self.c.attention.kernel == "eager":
            v, q = ops.restrided_view(v, "v"), ops.restrided_view(q, "q")
        return q, k, v
