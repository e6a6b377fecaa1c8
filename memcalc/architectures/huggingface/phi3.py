"""Phi-3: one linear layer for queries, keys and values, one for gate and up."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.programs.tape import Tensor


class Phi3(Llama):
    """Phi3DecoderLayer: dropout of both branches before their sums; Phi3MLP is `gated_of_one`."""

    silent_after: tuple[str, ...] = ("attention.o_proj", "mlp.down_proj")
    always_joins = True
    joins_queries_first = True

    def before_sum(self, x: Tensor, total: str) -> Tensor:
        """resid_attn_dropout and resid_mlp_dropout."""
        return self.ops.dropout(x, f"dropout before {total}", self.c.residual.dropout)

    def projected(self, x: Tensor) -> dict[str, Tensor]:
        """Slices of qkv, each with a gradient as large as qkv."""
        c, ops = self.c, self.ops
        width = "3·d" if c.attention.square and not c.attention.grouped else "(h+2·h_kv)·d_h"
        qkv = ops.linear(x, "attention.qkv_proj", (width, "d"), ("b", "s", width), bias=c.projections.bias)
        shapes = tuple(("b", "s", self.width_and_heads(name)[1], "d_h") for name in "qkv")
        parts = ops.slices(qkv, shapes, "q, k, v")
        return {name: self.by_head(part, name) for name, part in zip("qkv", parts, strict=True)}
