"""FLOPs of a layer's forward: matmuls only, a multiply-add counted as two, as by PyTorch's FLOP counter."""

from __future__ import annotations

from memcalc.layout.parameters import parameter_table, prefix_of
from memcalc.layout.weight_layout import weight_layout
from memcalc.spec.matmuls import layer_matmuls
from memcalc.spec.model import ATTENTION
from memcalc.spec.spec import Spec


def layer_flops(spec: Spec, layer: int) -> int:
    """Return the FLOPs of one rank's forward of one layer, for one micro-batch."""
    model, parallelism = spec.model, spec.parallelism
    tokens = spec.training.micro_batch_size * spec.training.sequence_length
    weights = 0
    for row in parameter_table(model):
        if (
            row.part != "layer"
            or len(row.shape) < 2
            or not row.module.startswith(("layers.*", prefix_of(model, layer)))
        ):
            continue
        if ".experts." in row.module and model.moe is not None:  # a token is routed to k of E
            weights += row.elements * model.moe.num_experts_per_token // model.moe.num_experts
        else:
            weights += row.elements
    products = (
        2  # multiply and add
        * tokens
        * weights
    )
    attention = (
        2  # attention scores, and the weighted sum of values
        * 2  # multiply and add
        * tokens
        * spec.training.sequence_length  # all pairs: kernels that skip the masked half compute less
        * (model.query_size if model.mixer(layer) in ("", ATTENTION) else 0)
    )
    return (products + attention) // (parallelism.tensor_parallel * parallelism.context_parallel)


def head_flops(spec: Spec) -> int:
    """Return the FLOPs of one rank's forward of the LM head."""
    tokens = spec.training.micro_batch_size * spec.training.sequence_length
    whole = 2 * tokens * spec.model.embedding_size * spec.model.head_rows
    return whole // (spec.parallelism.tensor_parallel * spec.parallelism.context_parallel)


def product_flops(spec: Spec) -> dict[str, int]:
    """Return the FLOPs of one rank's forward of one plain layer by operator; they sum to `layer_flops`."""
    model, parallelism, training = spec.model, spec.parallelism, spec.training
    tokens = training.micro_batch_size * training.sequence_length
    ranks = parallelism.tensor_parallel * parallelism.context_parallel
    weights = {
        row.module.removeprefix("layers.*."): row.elements
        for row in parameter_table(weight_layout(model, "plain"))
        if row.part == "layer" and len(row.shape) == 2
    }
    if model.moe is not None:
        visited = model.moe.num_experts_per_token * model.hidden_size * model.moe.expert_intermediate_size
        weights |= dict.fromkeys(("mlp.experts.gate", "mlp.experts.up", "mlp.experts.down"), visited)
    attention = 2 * 2 * tokens * training.sequence_length * model.query_size  # as in `layer_flops`
    halves = {"scores": attention // 2, "attention output": attention // 2, "attention": attention}
    return {
        name: (halves[name] if name in halves else 2 * tokens * weights[name]) // ranks
        for name in layer_matmuls(model, training)
    }
