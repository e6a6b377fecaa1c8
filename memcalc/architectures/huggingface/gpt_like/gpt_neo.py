"""GPT-Neo: GPT-2's layers with separate linear layers for q, k and v, and fp32 attention matmuls."""

from __future__ import annotations

from memcalc.architectures.huggingface.gpt_like.gpt2 import Gpt2
from memcalc.architectures.huggingface.modules.fp32_attention import Fp32Attention
from memcalc.architectures.kv_cache import cached
from memcalc.programs.tape import Tensor


class GptNeo(Fp32Attention, Gpt2):
    """GPTNeoBlock; layers with and without a window differ only in the values of their mask."""

    silent_after: tuple[str, ...] = (*Gpt2.silent_after, "input_norm", "attention.v_proj")
    conv1d = False
    mask_first = True
    layers_take_positions = False
    names_returned = True

    def attention(self, x: Tensor) -> Tensor:
        """GPTNeoSelfAttention.forward."""
        c, ops = self.c, self.ops
        heads = ("b", "s", "h", "d_h")
        q, k, v = (  # the gradient of k is transposed
            ops.linear(x, f"attention.{name}_proj", ("d", "d"), heads, bias=False, copies_gradient=name == "k")
            for name in "qkv"
        )
        q, v = ops.restrided_view(q, "q"), ops.restrided_view(v, "v")
        if c.cache is not None:
            k, v = cached(ops, c.cache, k, v)
        attended = self.linear(self.attend_in_fp32(q, k, v), "attention.o_proj", ("d", "d"), ("b", "s", "d"))
        attended = ops.dropout(attended, "attention dropout", c.residual.dropout)
        self.tape.still_referenced(x, q, k, v)
        return attended

    def scored(self, x: Tensor) -> Tensor:
        """torch.where with the layer's mask, and a tensor of one number."""
        self.named = (self.ops.table("mask value", ("1",), x.dtype),)
        return self.ops.where(x, "scores of earlier tokens", ("s", self.c.keys))
