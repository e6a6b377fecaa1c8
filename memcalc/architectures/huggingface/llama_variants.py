"""Families that differ from Llama in multipliers, dropout, or the processing of logits."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.programs.tape import Tensor


class Granite(Llama):
    """GraniteDecoderLayer: multipliers of embeddings, branches and logits, applied for any value."""

    def token_embedding(self) -> Tensor:
        """inputs_embeds * embedding_multiplier."""
        return self.ops.scale(super().token_embedding(), "scaled embeddings")

    def before_sum(self, x: Tensor, total: str) -> Tensor:
        """hidden_states * residual_multiplier."""
        return self.ops.scale(x, f"scaled branch of {total}")

    def logits(self, x: Tensor) -> Tensor:
        """logits / logits_scaling."""
        return self.ops.scale(x, "scaled logits")


class SeedOss(Llama):
    """SeedOssAttention and SeedOssMLP, which end with dropout."""

    def attended(self, x: Tensor) -> Tensor:
        """nn.functional.dropout of attn_output."""
        return self.ops.dropout(x, "attention dropout", self.c.residual.dropout)

    def mlp(self, x: Tensor) -> Tensor:
        """nn.functional.dropout of down_proj."""
        return self.ops.dropout(super().mlp(x), "mlp dropout", self.c.residual.dropout)


class Starcoder2(SeedOss):
    """Starcoder2DecoderLayer: PyTorch's LayerNorm, an ungated MLP, and dropout as in SeedOss."""

    drops_between_tables = True


class Ernie4(Llama):
    """Ernie4_5Attention: RoPE on pairs of adjacent features, in fp32."""

    spreads_tables = True
    wide_tables = True
    turns_in_fp32 = True
