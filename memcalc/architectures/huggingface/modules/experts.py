"""Routed experts: one grouped GEMM for all of them, or in decoding one bmm (transformers 5.23, integrations/moe.py)."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.operators import Operators
from memcalc.programs.tape import Tensor

COPIES = ("b", "s", "k")


def silu_gated(ops: Operators, both: Tensor) -> Tensor:
    """_default_apply_gate: silu(gate) * up."""
    gate, up = ops.split(both, ((*COPIES, "F_e"),) * 2, "gate and up")
    product = ops.mul(ops.pointwise(gate, "mlp.experts.silu"), up, "mlp.experts.silu(gate) * up")
    ops.tape.still_referenced(both)
    return product


def relu_squared(ops: Operators, up: Tensor) -> Tensor:
    """relu2 of an MLP without gate."""
    return ops.pow(ops.pointwise(up, "mlp.experts.relu", saves="output"), "mlp.experts.relu²")


def grouped_experts(
    ops: Operators,
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gated: Callable[[Operators, Tensor], Tensor] = silu_gated,
    *,
    biases: bool = False,
    up: str = "2·F_e",
    width: str = "d",
    batched: bool = False,
) -> Tensor:
    """grouped_mm_experts_forward, transformers' default: token copies, sorted by expert, through the experts and back.

    Its variables reference their tensors until it returns.

    Args:
        ops: the operators.
        x: the tokens, (b, s, d).
        weights: router weights of each token's experts, (b, s, k).
        chosen: indices of these experts.
        gated: function from gate and up to the input of the down projection.
        biases: whether experts have biases, one row per expert.
        up: axis of the first projection: of gate and up together, or "F_e" without a gate.
        width: axis of the tokens.
        batched: whether it is batched_mm_experts_forward instead, as in decoding by `generate`.
    """
    if batched:
        return _batched_experts(ops, x, weights, gated, biases=biases, up=up, width=width)
    rows = (*COPIES, width)
    ids, order = ops.sorted_order(chosen, "order of token copies")
    source = ops.table("tokens of copies", COPIES, "int64", "aten::floor_divide")
    selected = ops.rows_at(x, source, rows, "tokens by expert", x.shape[:-1])
    scales = ops.rows_at(weights, order, COPIES, "router weights by expert", COPIES)
    counted = ops.table("experts of copies", COPIES, "int32", "aten::_to_copy")
    counts = ops.table("copies of each expert", ("E",), "int32", "aten::histc")
    ends = ops.table("ends of groups", ("E",), "int32", "aten::cumsum")
    inner, out = (*COPIES, up), "mlp.experts.down_proj"
    into = f"mlp.experts.{'up_proj' if up == 'F_e' else 'gate_up_proj'}"
    bias = (ops.rows_of_bias(into, ("E", up), ids, inner),) if biases else ()
    both = ops.grouped_gemm(selected, ends, into, ("E", up, width), inner)
    product = gated(ops, ops.add_in_place(both, *bias, f"{into} and bias") if bias else both)
    before, bias = bias, (ops.rows_of_bias(out, ("E", width), ids, rows),) if biases else ()
    ops.tape.still_referenced(*before)
    down = ops.grouped_gemm(product, ends, out, ("E", width, "F_e"), rows)
    down = ops.add_in_place(down, *bias, f"{out} and bias") if bias else down
    weighted = ops.weigh(down, scales, "weighted expert outputs")
    back = ops.table("order of tokens", COPIES, "int64", "aten::empty_like")
    ops.table("positions of copies", COPIES, "int64", "aten::arange")
    ordered = ops.rows_at(weighted, back, rows, "weighted expert outputs by token", COPIES)
    summed = ops.sum_of_copies(ordered, x.shape, "sum of experts")
    total = ops.cast(summed, x.dtype, f"sum of experts in {x.dtype}")
    named = (chosen, ids, order, selected, scales, counted, counts, ends, down, back, ordered, summed)
    ops.tape.still_referenced(*named, *bias, weights)
    return total


def _batched_experts(
    ops: Operators,
    x: Tensor,
    weights: Tensor,
    gated: Callable[[Operators, Tensor], Tensor],
    *,
    biases: bool,
    up: str,
    width: str,
) -> Tensor:
    """batched_mm_experts_forward: the weights of each token's experts are copied for it, and multiplied by one bmm.

    transformers 5.23 generation/utils.py, _optimize_model_for_decode: `generate` decodes by it on GPUs.
    """
    rows, citation = (*COPIES, width), "aten::index"
    selected = ops.table("tokens of copies", rows, x.dtype, "aten::repeat_interleave")
    first = ops.table("weights of each token's experts", (*COPIES, up, width), x.dtype, citation)
    bias = (ops.table("biases of each token's experts", (*COPIES, up), x.dtype, citation),) if biases else ()
    both = ops.matmul(selected, first, "mlp.experts.gate and up", (*COPIES, up))
    both = ops.add_in_place(both, *bias, "mlp.experts.gate and up, and bias") if bias else both
    product = gated(ops, both)
    second = ops.table("down weights of each token's experts", (*COPIES, width, "F_e"), x.dtype, citation)
    ops.tape.still_referenced(first)
    more = (ops.table("down biases of each token's experts", rows, x.dtype, citation),) if biases else ()
    ops.tape.still_referenced(*bias)
    down = ops.matmul(product, second, "mlp.experts.down", rows)
    down = ops.add_in_place(down, *more, "mlp.experts.down and bias") if more else down
    ops.tape.still_referenced(product)
    weighted = ops.weigh(down, weights, "weighted expert outputs")
    summed = ops.sum_of_copies(weighted, x.shape, "sum of experts")
    total = ops.cast(summed, x.dtype, f"sum of experts in {x.dtype}")
    ops.tape.still_referenced(selected, second, *more, down, weighted, summed, weights)
    return total
