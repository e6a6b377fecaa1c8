"""Scaling of a model: heads, sizes and layers grow in proportion."""

from __future__ import annotations

from math import gcd, lcm
from typing import Any

from memcalc.spec.model import ModelSpec

# Sizes that do not scale to integers are rounded up to multiples of this: tensor cores need multiples of 8 16-bit
# numbers (NVIDIA, Matrix Multiplication Background User's Guide, section 4), and 16 ranks may share a matrix.
ROUND = 128


def heads_step(model: ModelSpec, tensor_parallel: int) -> int:
    """Return the smallest step of query heads: whole key/value groups, equal on every rank."""
    group = model.num_attention_heads // model.num_key_value_heads
    if model.full_attention is not None:
        group = lcm(group, model.num_attention_heads // model.full_attention.num_key_value_heads)
    per_rank = tensor_parallel // gcd(tensor_parallel, group)
    return group * per_rank


def scaled(model: ModelSpec, heads: int) -> dict[str, Any]:
    """Return the fields of the model with `heads` query heads, everything else in proportion.

    head_dim stays. Hidden size, MLP and expert sizes, and the number of layers keep their ratio to the number of heads:
    sizes are rounded up to multiples of ROUND, layers to the nearest integer.
    """
    whole = model.num_attention_heads

    def width(size: int) -> int:
        exact = size * heads
        return exact // whole if exact % whole == 0 else -(-exact // (whole * ROUND)) * ROUND

    fields: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads * model.num_key_value_heads // whole),
        "hidden_size": width(model.hidden_size),
        "intermediate_size": width(model.intermediate_size),
        "embedding_size": width(model.embedding_size),
        "num_layers": max(1, (model.num_layers * heads + whole // 2) // whole),
    }
    if model.moe is not None:
        inner = {
            "expert_intermediate_size": width(model.moe.expert_intermediate_size),
            "shared_expert_intermediate_size": width(model.moe.shared_expert_intermediate_size),
            "first_dense_layers": min(model.moe.first_dense_layers, fields["num_layers"]),
            "dense_layers": tuple(layer for layer in model.moe.dense_layers if layer < fields["num_layers"]),
        }
        fields["moe"] = model.moe.model_copy(update=inner)
    if model.full_attention is not None:
        groups = max(1, heads * model.full_attention.num_key_value_heads // whole)
        fields["full_attention"] = model.full_attention.model_copy(update={"num_key_value_heads": groups})
    return fields
