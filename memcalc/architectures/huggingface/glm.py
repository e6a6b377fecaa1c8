"""GLM: one linear layer for gate and up, and RoPE on a part of each head."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import BetweenNorms, Llama


class Glm(Llama):
    """GlmAttention: RoPE rotates pairs of adjacent features."""

    always_joins = True
    spreads_tables = True


class Glm4(BetweenNorms, Glm):
    """Glm4DecoderLayer: norms before and after both branches."""
