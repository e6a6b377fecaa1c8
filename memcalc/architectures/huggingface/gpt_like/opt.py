"""OPT: position ids per sequence, queries scaled before attention, norms before or after the branches."""

from __future__ import annotations

from memcalc.architectures.huggingface.modules.mlp import Mlps
from memcalc.architectures.kv_cache import cached
from memcalc.ledger.component import Component
from memcalc.programs.tape import Tensor


class Opt(Mlps):
    """OPTDecoderLayer."""

    mlp_is_module = False
    rotates = False
    mask_first = True

    def position_ids(self) -> Tensor:
        """Position ids: the cumulative sum of a mask of ones, minus one."""
        ops, tokens = self.ops, ("b", "s")
        ones = ops.table("ones in place of a mask", tokens, "fp32", self.citation, Component.TEMPORARIES)
        self.tape.live.names.add(ones.storage)
        counted = ops.table("sums of ones", tokens, "fp32", of=(ones,))
        seen = ops.table("sums where a token is", tokens, "fp32", of=(counted, ones))
        before = ops.table("tokens before", tokens, "fp32", of=(seen,))
        ids = self.argument("position ids", tokens, before)
        self.tape.still_referenced(counted)
        self.name_positions(ids.storage)
        return ids

    def positions(self, ids: Tensor | None) -> Tensor:  # noqa: ARG002
        """OPTLearnedPositionalEmbedding: rows with an offset of two."""
        return self.ops.embedding("embed_positions", (self.c.position.table, "d"), ("b", "s"), counts=True)

    def layer(self) -> Tensor:
        """Attention, then the MLP, with tokens as a matrix; the variable `hidden_states` is rebound at each step."""
        c, ops = self.c, self.ops
        before = c.head.norm  # do_layer_norm_before
        x = self.entry()
        attended = self.attention(self.norm(x, "input_norm", "d") if before else x)
        x = ops.add(x, ops.dropout(attended, "attention dropout", c.residual.dropout), "attention sum")
        x = x if before else self.norm(x, "input_norm", "d")
        x = ops.flattened(x, "tokens")
        fed = self.mlp(self.norm(x, "post_attention_norm", "d") if before else x)
        output = ops.add(x, ops.dropout(fed, "mlp dropout", c.residual.dropout), "layer output")
        output = ops.viewed(output, output.shape, "layer output by sequence")
        return output if before else self.norm(output, "post_attention_norm", "d")

    def attention(self, x: Tensor) -> Tensor:
        """OPTAttention.forward."""
        c, ops = self.c, self.ops
        width, heads = ("d", "d"), ("b", "s", "h", "d_h")
        parts: dict[str, Tensor] = {}
        for name in ("q", "k", "v"):
            part = ops.linear(x, f"attention.{name}_proj", width, heads, bias=c.projections.bias)
            part = ops.scale(part, "q scaled") if name == "q" else part
            parts[name] = ops.restrided_view(part, name) if c.attention.kernel == "eager" else part
        q, k, v = parts["q"], parts["k"], parts["v"]
        if c.cache is not None:
            k, v = cached(ops, c.cache, k, v)
        core = (
            self.eager(q, k, v, softmax_in_fp32=True)
            if c.attention.kernel == "eager"
            else self.scaled_dot_product(q, k, v)
        )
        y = ops.linear(core, "attention.o_proj", width, ("b", "s", "d"), bias=c.projections.output_bias)
        self.tape.still_referenced(x, q, k, v)
        return y
