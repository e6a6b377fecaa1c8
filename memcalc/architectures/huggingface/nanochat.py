"""NanoChat."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.architectures.huggingface.modules.norms import bare_rms_norm
from memcalc.programs.tape import Tensor


class NanoChat(Llama):
    """NanoChatDecoderLayer: norms without weights, also after RoPE and of the embeddings; soft-capped logits."""

    norms_heads = "after positions"

    def norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """NanoChatRMSNorm."""
        return bare_rms_norm(self.ops, x, module, width)

    def swapped(self, x: Tensor, name: str) -> Tensor:
        """rotate_half, which negates the first half."""
        ops = self.ops
        half = (*x.shape[:-1], f"{x.shape[-1]}/2")
        first, second = ops.slices(x, (half, half), f"{name} halves")
        return ops.concatenate((second, ops.scale(first, f"-{name} half")), x.shape, f"turned {name}")

    def first_hidden(self, x: Tensor) -> Tensor:
        """The norm before the layers."""
        return self.norm(x, "embed_norm", "d")

    def logits(self, x: Tensor) -> Tensor:
        """final_logit_softcapping."""
        return self.soft_capped(x, "logits")
