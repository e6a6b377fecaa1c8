"""Phi: attention and MLP side by side after one norm, and positions of a part of each head."""

from __future__ import annotations

from memcalc.estimation.blocks.huggingface.llama import PartlyTurned
from memcalc.estimation.tape import Tensor


class Phi(PartlyTurned):
    """PhiDecoderLayer."""

    drops_between_tables = True
    renames_embeddings = True

    def layer(self) -> Tensor:
        """Attention and the MLP of one normed input, which has its name until both have been added up."""
        c, ops = self.c, self.ops
        x = self.entry()
        normed = self.norm(x, "input_norm", "d")
        attended = ops.dropout(self.attention(normed), "attention dropout", c.residual_dropout)
        fed = ops.dropout(self.mlp(normed), "mlp dropout", c.residual_dropout)
        output = ops.add(ops.add(attended, fed, "block sum"), x, "layer output")
        self.tape.still_named(normed, attended, fed)
        return output
