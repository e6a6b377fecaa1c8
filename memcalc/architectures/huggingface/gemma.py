"""Gemma and its successors."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.architectures.huggingface.modules.norms import shifted_rms_norm
from memcalc.programs.tape import Tensor


class Gemma(Llama):
    """GemmaDecoderLayer: norms with a weight around 1; the embedding module scales its output."""

    def norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """GemmaRMSNorm."""
        return shifted_rms_norm(self.ops, x, module, width)

    def token_embedding(self) -> Tensor:
        """GemmaTextScaledWordEmbedding: rows times a buffer of one element.

        With a frozen embedding, the module's output is the tensor set to require a gradient.
        """
        rows = super().token_embedding()
        leaf = self.tape.leaves.pop(rows.storage, None) is not None
        rows.grad = rows.grad and not leaf
        scaled = self.ops.scale(rows, "scaled embeddings")
        if rows.grad:
            self.tape.also_saves(Tensor(-1, ("1",), self.c.embedded))
        if leaf:
            scaled.grad = True
            self.tape.leaves[scaled.storage] = self.tape.nodes[-1]
        return scaled


class Gemma2(Gemma):
    """Gemma2DecoderLayer: norms before and after both branches; scores and logits are soft-capped."""

    eager_only = True
    masks_windows = True

    def layer(self) -> Tensor:
        """Attention between two norms, then the MLP between two."""
        return self.between_norms()

    def scores(self, x: Tensor) -> Tensor:
        """attn_logit_softcapping."""
        return self.soft_capped(x, "scores")

    def logits(self, x: Tensor) -> Tensor:
        """final_logit_softcapping."""
        return self.soft_capped(x, "logits")


class Gemma3(Gemma):
    """Gemma3DecoderLayer: norms before and after both branches, QK norms; a separate RoPE cache for windows."""

    norms_heads = "together"
    masks_windows = True
    turns_windows = True

    def layer(self) -> Tensor:
        """Attention between two norms, then the MLP between two."""
        return self.between_norms()
