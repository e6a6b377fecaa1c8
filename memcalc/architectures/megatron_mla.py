"""Megatron-Core's multi-latent attention (core/transformer/multi_latent_attention.py, core_r0.14)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.programs.tape import Tensor

if TYPE_CHECKING:
    from memcalc.architectures.megatron import MegatronLayer


def latent_attention(layer: MegatronLayer, x: Tensor) -> Tensor:
    """Down projections to replicated latents; norm and up projection in one module; keys and values of all heads."""
    from memcalc.architectures.megatron import norm

    c, ops = layer.c, layer.ops
    h = layer.axis("h")
    tokens, local = ("b", "s"), ("b", layer.stream)
    query = layer.axis("h·(d_n+d_r)")
    if c.projections.query_latent:
        latent = ops.duplicated(x, "attention.q_a_proj", "r_q", (*local, "r_q"), bias=c.projections.bias)
        latent = norm(ops, c, latent, "attention.q_a_norm", "r_q")
        q = ops.column_parallel(latent, "attention.q_b_proj", query, (*tokens, h, "d_n+d_r"), bias=False)
    else:
        q = ops.column_parallel(x, "attention.q_proj", query, (*tokens, h, "d_n+d_r"), bias=False)
    joint = ops.duplicated(x, "attention.kv_a_proj", "r_kv+d_r", (*local, "r_kv+d_r"), bias=c.projections.bias)
    compressed, key_position = ops.split(joint, ((*local, "r_kv"), (*tokens, "d_r")), "latents")
    compressed = norm(ops, c, ops.copy(compressed, "latent"), "attention.kv_a_norm", "r_kv")
    width = layer.axis("h·(d_n+d_v)")
    kv = ops.column_parallel(compressed, "attention.kv_b_proj", width, (*tokens, h, "d_n+d_v"), bias=False)
    key, value = ops.split(kv, ((*tokens, h, "d_n"), (*tokens, h, "d_v")), "keys and values")
    plain, position = ops.split(q, ((*tokens, h, "d_n"), (*tokens, h, "d_r")), "query parts")
    joined = (*tokens, h, "d_n+d_r")
    q = ops.concatenate((plain, ops.scale(position, "rotated q")), joined, "q")
    k = ops.concatenate((key, ops.scale(key_position, "rotated k")), joined, "k")
    v = ops.copy(value, "v")
    return layer.core(q, k, v, h, h, "d_n+d_r", out=(*tokens, h, "d_v"))
