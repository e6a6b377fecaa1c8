"""GLM: one linear layer for gate and up, and RoPE on a part of each head."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.programs.tape import Tensor


class Glm(Llama):
    """GlmAttention: RoPE rotates pairs of adjacent features."""

    always_joins = True
    spreads_tables = True


class Glm4(Glm):
    """Glm4DecoderLayer: norms before and after both branches."""

    def layer(self) -> Tensor:
        """Attention between two norms, then the MLP between two."""
        return self.between_norms()
