"""Norms of a model's layers, with the parameters they have."""

from __future__ import annotations

from memcalc.architectures.options.layers import NormOptions
from memcalc.operators import Operators
from memcalc.programs.tape import Shape, Tensor


def norm(
    ops: Operators,
    options: NormOptions,
    x: Tensor,
    module: str,
    width: str = "d",
    *,
    weight: bool = True,
    out: Shape | None = None,
) -> Tensor:
    """LayerNorm or RMSNorm, with the parameters of the model's norms."""
    y = _norm(ops, options, x, module, width, weight=weight, out=out)
    ops.tape.still_referenced(x)  # the module's argument, which autocast casts inside
    return y


def _fp32_rms_norm(ops: Operators, x: Tensor, module: str, width: str, out: Shape | None) -> Tensor:
    """weight * normed on an fp32 copy of the input, cast at the end.

    LitGPT 0.5.13 litgpt/model.py, RMSNorm; torchtune 0.6.1 modules/rms_norm.py, where F.rms_norm falls back to separate
    operators because the weight is not in fp32.
    """
    normed = ops.normed_in_fp32(x, module)
    return ops.cast(ops.times_weight(normed, module, width, out), x.dtype, f"{module} output in {x.dtype}")


def _norm(
    ops: Operators, options: NormOptions, x: Tensor, module: str, width: str, *, weight: bool, out: Shape | None
) -> Tensor:
    tensors = ("weight",) if weight and options.weight else ()
    if options.kind == "rmsnorm":
        if options.in_fp32 and tensors:
            return _fp32_rms_norm(ops, x, module, width, out)
        if options.composite:
            return ops.composite_rms_norm(x, module, width, weight=bool(tensors), out=out)
        return ops.rms_norm(x, module, width, tensors, out)
    return ops.layer_norm(x, module, width, (*tensors, "bias") if tensors and options.bias else tensors, out)
