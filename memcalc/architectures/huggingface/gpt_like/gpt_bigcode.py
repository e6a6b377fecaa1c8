"""GPT-BigCode: GPT-2 with one key head and one value head for all query heads."""

from __future__ import annotations

from memcalc.architectures.huggingface.gpt_like.gpt2 import Gpt2
from memcalc.programs.tape import Tensor


class GptBigcode(Gpt2):
    """GPTBigCodeBlock."""

    conv1d = False
    mask_first = True
    softmax_in_fp32 = True
    layers_take_positions = False

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """c_attn: queries, then one key and one value; or, with as many key heads as query heads, q, k, v per head."""
        c, ops = self.c, self.ops
        heads, shared = ("b", "s", "h", "d_h"), ("b", "s", "h_kv", "d_h")
        if not c.attention.grouped:
            qkv = self.linear(x, "attention.qkv_proj", ("3·d", "d"), ("b", "s", "h", "3·d_h"))
            q, k, v = ops.split(ops.restrided_view(qkv, "q, k, v"), (heads, heads, heads), "q, k, v")
            return q, k, v
        width = "(h+2·h_kv)·d_h"
        qkv = self.linear(x, "attention.qkv_proj", (width, "d"), ("b", "s", width))
        q, k, v = ops.split(qkv, (heads, shared, shared), "q, k, v")
        return (ops.restrided_view(q, "q") if c.attention.by_matmuls else q), k, v
