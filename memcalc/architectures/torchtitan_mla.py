"""torchtitan's multi-head latent attention with FlexAttention, as in its DeepSeek-V3.

Sources: torchtitan 0.2.2 torchtitan/models/deepseek_v3/model/model.py, Attention.forward and apply_rotary_emb;
torchtitan/models/attention.py, FlexAttentionWrapper, which compiles flex_attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.architectures.norms import norm
from memcalc.programs.tape import Tensor

if TYPE_CHECKING:
    from memcalc.architectures.torchtitan import TorchtitanLayer

TOKENS = ("b", "s")


class TorchtitanLatentAttention:
    """Writer of DeepSeek-V3's Attention.forward.

    Args:
        layer: the writer of the layer.
    """

    def __init__(self, layer: TorchtitanLayer) -> None:
        self.layer = layer
        self.c, self.ops, self.tape, self.split = layer.c, layer.ops, layer.tape, layer.split
        self.heads = (*TOKENS, layer.axis("h"))

    def output(self, normed: Tensor) -> Tensor:
        """Queries, keys and values through latents; RoPE on a part of each head, which all keys share."""
        ops, split = self.ops, self.split
        x = split.module_input(normed, "attention")
        q = self.queries(x)
        plain_q, turning_q = ops.split(q, ((*self.heads, "d_n"), (*self.heads, "d_r")), "q parts")
        turned_q = self.rotated(turning_q, "q")
        whole_q = ops.concatenate((plain_q, turned_q), (*self.heads, "d_n+d_r"), "q joined")
        self.tape.still_referenced(q, turned_q)
        latent = (*TOKENS, "r_kv+d_r")
        joint = ops.linear(x, "attention.kv_a_proj", ("r_kv+d_r", "d"), latent, bias=False)
        compressed, turning_k = ops.split(joint, ((*TOKENS, "r_kv"), (*TOKENS, "1", "d_r")), "latents")
        turned_k = self.rotated(turning_k, "k")
        normed_latent = norm(ops, self.c.norm, compressed, "attention.kv_a_norm", "r_kv")
        both = (*self.heads, "d_n+d_v")
        kv = split.column(
            normed_latent, "attention.kv_b_proj", (self.layer.axis("h·(d_n+d_v)"), "r_kv"), both, bias=False
        )
        plain_k, v = ops.split(kv, ((*self.heads, "d_n"), (*self.heads, "d_v")), "k and v")
        for_all = ops.expanded(turned_k, "turned k for each head", (*self.heads, "d_r"))
        k = ops.concatenate((plain_k, for_all), (*self.heads, "d_n+d_r"), "k joined")
        core = ops.flex_attention(whole_q, k, v, self.layer.axis("h"), (*self.heads, "d_v"))
        out = split.row(core, "attention.o_proj", ("d", self.layer.axis("h·d_v")), bias=False)
        split.returned(x, whole_q, turned_q, turned_k, k, kv, core, joint)
        return out

    def queries(self, x: Tensor) -> Tensor:
        """Project queries, through a latent if the model has one for queries."""
        ops, split = self.ops, self.split
        out, width = (*self.heads, "d_n+d_r"), self.layer.axis("h·(d_n+d_r)")
        if not self.c.projections.query_latent:
            return split.column(x, "attention.q_proj", (width, "d"), out, bias=False)
        latent = ops.linear(x, "attention.q_a_proj", ("r_q", "d"), (*TOKENS, "r_q"), bias=False)
        normed = norm(ops, self.c.norm, latent, "attention.q_a_norm", "r_q")
        return split.column(normed, "attention.q_b_proj", (width, "r_q"), out, bias=False)

    def rotated(self, x: Tensor, name: str) -> Tensor:
        """apply_rotary_emb: pairs of features as complex fp32 numbers, times a cache, and back."""
        ops = self.ops
        wide = ops.cast(x, "fp32", f"{name} in fp32")
        turned = self.layer.times_cache(wide, name, "d_r")
        y = ops.cast(turned, x.dtype, f"rotated {name}")
        self.tape.still_referenced(wide, turned)
        return y
