"""Attention with fp32 matmuls (GPT-J, GPT-Neo)."""

from __future__ import annotations

from memcalc.architectures.huggingface.modules.mlp import Mlps
from memcalc.programs.tape import Tensor


class Fp32Attention(Mlps):
    """Families with an `_attn` that casts queries and keys to fp32, before autocast casts them back."""

    named: tuple[Tensor, ...] = ()  # further tensors that its variables reference

    def attend_in_fp32(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """_attn; its variables reference the casts until it returns."""
        c, ops = self.c, self.ops
        wide_q, wide_k = ops.cast(q, "fp32", "q in fp32"), ops.cast(k, "fp32", "k in fp32")
        copies = ("q by head" if self.copies_queries else "", "k by head" if self.copies_keys else "")
        scores = self.scored(ops.matmul(wide_q, wide_k, "scores", ("b", "h", "s", c.keys), copies))
        scores = ops.shift(scores, "masked scores", c.dtypes.embedded)
        probabilities = ops.cast(ops.softmax(scores, "attention probabilities"), v.dtype, "probabilities in dtype")
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention.dropout)
        self.weights = (dropped,)
        values = ops.copy(v, "v by head") if self.copies_keys else v
        core = ops.matmul(dropped, values, "attention output", ("b", "s", "h", "d_h"))
        self.tape.still_referenced(wide_q, wide_k, *self.named)
        return self.by_token(core)

    def scored(self, x: Tensor) -> Tensor:
        """Return the scores before the mask is added."""
        return self.ops.scale(x, "scaled scores")
