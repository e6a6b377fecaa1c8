"""Cohere's Command-R."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.architectures.huggingface.modules.norms import fp32_layer_norm
from memcalc.programs.tape import Tensor


class Cohere(Llama):
    """CohereDecoderLayer: attention and MLP in parallel after one norm; RoPE in fp32."""

    norms_heads = "together"
    casts_to_turn = True

    def norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """CohereLayerNorm."""
        return fp32_layer_norm(self.ops, x, module, (width,))

    def head_norm(self, x: Tensor, name: str) -> Tensor:
        """CohereLayerNorm with a separate weight per head."""
        return fp32_layer_norm(self.ops, x, f"attention.{name}_norm", x.shape[-2:]) if self.c.projections.qk_norm else x

    def layer(self) -> Tensor:
        """The norm, both branches, and their sum."""
        x = self.entry()
        given = self.norm(x, "input_norm", "d")
        attended = self.attention(given)
        fed = self.mlp(given)
        y = self.ops.add(self.ops.add(x, attended, "attention sum"), fed, "layer output")
        self.tape.still_referenced(given, attended, fed)
        return y

    def logits(self, x: Tensor) -> Tensor:
        """logits * logit_scale."""
        return self.ops.scale(x, "scaled logits")


class Cohere2(Cohere):
    """Cohere2DecoderLayer: CohereDecoderLayer with QK norms; layers without a sliding window apply no RoPE."""

    masks_windows = True
