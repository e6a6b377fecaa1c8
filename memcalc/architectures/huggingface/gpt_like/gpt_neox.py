"""GPT-NeoX: one linear layer with q, k and v per head, RoPE on a part of each head, two norms of one input."""

from __future__ import annotations

from memcalc.architectures.huggingface.modules.mlp import Mlps
from memcalc.architectures.huggingface.modules.rotary import Rotary
from memcalc.architectures.kv_cache import cached
from memcalc.programs.tape import Tensor


class GptNeox(Rotary, Mlps):
    """GPTNeoXLayer: attention and MLP in parallel or sequentially."""

    silent_after: tuple[str, ...] = ("embed_tokens", "attention.o_proj", "mlp.down_proj")
    always_joins = True
    drops_between_tables = True

    def layer(self) -> Tensor:
        """Both branches, each with a separate norm."""
        c, ops = self.c, self.ops
        x = self.entry()
        attended = ops.dropout(self.attention(self.norm(x, "input_norm", "d")), "attention dropout", c.residual.dropout)
        if not c.residual.parallel:
            attended = x = ops.add(attended, x, "attention sum")
        normed = self.norm(x, "post_attention_norm", "d")
        fed = self.mlp(normed)
        self.tape.still_referenced(normed)
        fed = ops.dropout(fed, "mlp dropout", c.residual.dropout)
        output = ops.add(fed, attended, "block sum" if c.residual.parallel else "layer output")
        if c.residual.parallel:
            output = ops.add(output, x, "layer output")
        self.tape.still_referenced(attended, fed)
        return output

    def attention(self, x: Tensor) -> Tensor:
        """GPTNeoXAttention.forward; variables reference the views of qkv until it returns."""
        c, ops = self.c, self.ops
        heads = ("b", "s", "h", "d_h")
        qkv = ops.linear(x, "attention.qkv_proj", ("3·d", "d"), ("b", "s", "h", "3·d_h"), bias=c.projections.bias)
        # the gradients of q, k and v are concatenated by head, and copied by token
        q, k, v = ops.split(ops.restrided_view(qkv, "q, k, v"), (heads, heads, heads), "q, k, v")
        q, k = self.positioned(q, k)
        if c.cache is not None:
            k, v = cached(ops, c.cache, k, v)
        if c.attention.kernel == "eager":
            core = self.eager(q, k, v, softmax_in_fp32=True)
        else:
            core = self.scaled_dot_product(q, k, v)
        y = ops.linear(core, "attention.o_proj", ("d", "d"), ("b", "s", "d"), bias=c.projections.output_bias)
        self.tape.still_referenced(x, qkv, q, k, v)
        return y
