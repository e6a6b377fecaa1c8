"""Routed experts as transformers runs them in generation: one grouped GEMM for all experts, forward only.

Source: transformers 5.23 integrations/moe.py, grouped_mm_experts_forward; models/olmoe/modeling_olmoe.py, TopKRouter.
Its Python variables reference their tensors until the function returns.
"""

from __future__ import annotations

from memcalc.architectures.structure import BlockStructure
from memcalc.operators import Operators
from memcalc.programs.tape import Tensor

# families with fp32 router weights, so their products are fp32 (modeling_<family>.py)
WIDE_WEIGHTS = ("deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2")


def grouped_products(ops: Operators, c: BlockStructure, x: Tensor) -> Tensor:
    """Route each token to k experts: k copies, sorted by expert, through both GEMMs, restored and summed."""
    copies, tape = ("b", "s", "k"), ops.tape
    logits = ops.linear(x, "mlp.router", ("E", "d"), ("b", "s", "E"), bias=c.experts.router_bias)
    probabilities = ops.softmax(ops.cast(logits, "fp32"), "router probabilities")
    weights = ops.gather(probabilities, copies, "router weights")
    selected = ops.gather(x, (*copies, "d"), "tokens by expert")
    inner = "2·F_e" if c.mlp.gated else "F_e"
    up = ops.batched_linear(selected, "mlp.experts.up", ("E", inner, "d"), (*copies, inner), bias=False)
    product = ops.pointwise(Tensor(up.storage, (*copies, "F_e"), up.dtype, grad=False), "mlp.experts.activation")
    if c.mlp.gated:
        product = ops.mul(product, up, "mlp.experts.activation(gate) * up", (*copies, "F_e"))
        tape.still_referenced(up)
    down = ops.batched_linear(product, "mlp.experts.down", ("E", "d", "F_e"), (*copies, "d"), bias=False)
    scales = weights if c.family in WIDE_WEIGHTS else ops.cast(weights, down.dtype)
    weighted = ops.mul(down, scales, "weighted expert outputs")
    ordered = ops.copy(weighted, "weighted expert outputs by token")
    total = ops.cast(ops.scattered(ordered, ("b", "s", "d"), "sum of experts"), down.dtype)
    tape.still_referenced(x, logits, probabilities, weights, selected, down)
    return total
