"""Work of a model per token: computation and communication for the cost model."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from memcalc.layout.parameters import parameter_table
from memcalc.spec.model import ModelSpec


class Workload(NamedTuple):
    """Sizes of a model. Operations are FLOPs (multiplications plus additions) of one token's forward.

    Args:
        layers: parameters of all layers without routed experts.
        experts: parameters of routed experts.
        ends: parameters of embedding, LM head and final norm; the larger end if they are on different stages.
        both_ends: parameters of both ends together; a tied weight counts once.
        layer_flops: of the weight matrices of the average layer.
        attention_flops: of the average layer's attention itself, per token of context.
        head_flops: of the logits.
    """

    layers: int
    experts: int
    ends: int
    embedding_and_head: int
    layer_flops: float
    attention_flops: float
    head_flops: float


@lru_cache(maxsize=64)
def work_of(model: ModelSpec) -> Workload:
    """Return the sizes of a model."""
    layers = experts = 0
    ends = {"embedding": 0, "head": 0}
    for row in parameter_table(model):
        if row.part != "layer":
            ends[row.part] += row.total
        elif ".experts." in row.module:
            experts += row.total
        else:
            layers += row.total
    visited = 0.0  # parameters of the experts that one token is routed to
    if model.moe is not None:
        visited = experts * model.moe.num_experts_per_token / model.moe.num_experts
    logits = model.head_rows * model.embedding_size
    return Workload(
        layers=layers,
        experts=experts,
        ends=max(ends["embedding"], ends["head"], logits),
        embedding_and_head=sum(ends.values()),
        # two operations per parameter (Kaplan et al., arXiv 2001.08361, section 2.1)
        layer_flops=2 * (layers + visited) / model.num_layers,
        # attention scores and their product with the values: 2 x 2·s·h·d_h (Megatron-LM, arXiv 2104.04473, appendix),
        # of which a causal kernel computes half
        attention_flops=4 * model.query_size / 2,
        head_flops=2 * logits,
    )
