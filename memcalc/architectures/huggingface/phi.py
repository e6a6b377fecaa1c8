"""Phi: attention and MLP in parallel after one norm, and RoPE on a part of each head."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import PartialRotary
from memcalc.programs.tape import Tensor


class Phi(PartialRotary):
    """PhiDecoderLayer."""

    silent_after: tuple[str, ...] = ("embed_tokens", "attention.o_proj", "mlp.down_proj")
    drops_between_tables = True
    renames_embeddings = True

    def layer(self) -> Tensor:
        """Attention and MLP of one normed input, referenced until both are added."""
        c, ops = self.c, self.ops
        x = self.entry()
        normed = self.norm(x, "input_norm", "d")
        attended = ops.dropout(self.attention(normed), "attention dropout", c.residual.dropout)
        fed = ops.dropout(self.mlp(normed), "mlp dropout", c.residual.dropout)
        output = ops.add(ops.add(attended, fed, "block sum"), x, "layer output")
        self.tape.still_referenced(normed, attended, fed)
        return output
