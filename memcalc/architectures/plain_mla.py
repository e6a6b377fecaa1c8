"""Multi-head latent attention of the reference decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.architectures.kv_cache import cached, cached_attention
from memcalc.architectures.norms import norm
from memcalc.programs.tape import Tensor

if TYPE_CHECKING:
    from memcalc.architectures.plain import PlainBlock


def latent_attention(layer: PlainBlock, x: Tensor) -> Tensor:
    """DeepSeek-V2's latent attention (arXiv 2405.04434) as in training, without absorbed weights."""
    c, ops = layer.c, layer.ops
    h = layer.axis("h")
    tokens = ("b", "s")
    q_width = layer.axis("h·(d_n+d_r)")
    if c.projections.query_latent:
        latent = ops.linear(x, "attention.q_a_proj", ("r_q", "d"), (*tokens, "r_q"), bias=c.projections.bias)
        latent = norm(ops, c.norm, latent, "attention.q_a_norm", "r_q")
        q = layer.split.column(latent, "attention.q_b_proj", (q_width, "r_q"), (*tokens, h, "d_n+d_r"), bias=False)
    else:
        q = layer.split.column(x, "attention.q_proj", (q_width, "d"), (*tokens, h, "d_n+d_r"), bias=False)
    joint = ops.linear(x, "attention.kv_a_proj", ("r_kv+d_r", "d"), (*tokens, "r_kv+d_r"), bias=c.projections.bias)
    compressed, key_position = ops.split(joint, ((*tokens, "r_kv"), (*tokens, "d_r")), "latents")
    compressed = norm(ops, c.norm, compressed, "attention.kv_a_norm", "r_kv")
    kv_width = layer.axis("h·(d_n+d_v)")
    if c.cache is not None:
        compressed, key_position = cached(ops, c.cache, compressed, key_position)
    read = ("b", c.keys)
    out = (*read, h, "d_n+d_v")
    kv = layer.split.column(compressed, "attention.kv_b_proj", (kv_width, "r_kv"), out, bias=False)
    key, value = ops.split(kv, ((*read, h, "d_n"), (*read, h, "d_v")), "keys and values")
    plain, position = ops.split(q, ((*tokens, h, "d_n"), (*tokens, h, "d_r")), "query parts")
    q = ops.concatenate((plain, ops.scale(position, "rotated q")), (*tokens, h, "d_n+d_r"), "q")
    k = ops.concatenate((key, ops.scale(key_position, "rotated k")), (*read, h, "d_n+d_r"), "k")
    if c.attention.kernel == "eager":
        scores = ops.scale(ops.matmul(q, k, "scores", ("b", h, "s", c.keys)), "scaled scores")
        probabilities = ops.softmax(ops.scale(scores, "masked scores"), "attention probabilities")
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention.dropout)
        core = ops.copy(ops.matmul(dropped, value, "attention output", (*tokens, h, "d_v")), "output by token")
    elif c.cache is not None:
        core = cached_attention(ops, c, q, k, value, (h, h, "d_n+d_r"), (*tokens, h, "d_v"))
    else:
        core = ops.flash_attention(q, k, value, h, h, "d_n+d_r", "s", out=(*tokens, h, "d_v"))
    if c.saving.selective:
        layer.tape.recompute(core, (q, k, value))
    out_width = layer.axis("h·d_v")
    return layer.split.row(core, "attention.o_proj", ("d", out_width), bias=c.projections.output_bias)
