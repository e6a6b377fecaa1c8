"""Norms of transformers' families that are neither PyTorch's nor Llama's."""

from __future__ import annotations

from memcalc.operators import Operators
from memcalc.programs.tape import Shape, Tensor


def fp32_rms_norm(ops: Operators, x: Tensor, module: str, width: str, out: Shape | None = None) -> Tensor:
    """Olmo2RMSNorm: weight * normed in fp32, cast at the end."""
    variance, normed = ops.normed_with_variance(ops.cast(x, "fp32", f"{module} input in fp32"), module, None)
    y = ops.cast(ops.times_weight(normed, module, width, out), x.dtype, f"{module} output in {x.dtype}")
    ops.tape.still_referenced(x, variance, normed)
    return y


def bare_rms_norm(ops: Operators, x: Tensor, module: str, width: str) -> Tensor:
    """NanoChatRMSNorm: without a weight."""
    y = ops.composite_rms_norm(x, module, width, weight=False)
    ops.tape.still_referenced(x)
    return y


def bare_layer_norm(ops: Operators, x: Tensor, module: str, width: str) -> Tensor:
    """OlmoLayerNorm: PyTorch's in fp32, without parameters; cast at the end."""
    y = ops.layer_norm(ops.cast(x, "fp32", f"{module} input in fp32"), module, width, ())
    return ops.cast(y, x.dtype, f"{module} output in {x.dtype}")


def shifted_rms_norm(ops: Operators, x: Tensor, module: str, width: str) -> Tensor:
    """GemmaRMSNorm: normed * (1 + weight) in fp32, cast at the end."""
    product = ops.times_fp32_weight(ops.normed_in_fp32(x, module), module, (width,), shifted=True)
    y = ops.cast(product, x.dtype, f"{module} output in {x.dtype}")
    ops.tape.still_referenced(x)
    return y


def power_rms_norm(ops: Operators, x: Tensor, module: str, width: str, *, weight: bool = True) -> Tensor:
    """Gemma4RMSNorm: x * (mean(x²) + eps)^-0.5, times the weight, in fp32; cast at the end."""
    wide = ops.cast(x, "fp32", f"{module} input in fp32")
    mean = ops.shift(ops.mean(ops.pow(wide, f"{module} squares"), f"{module} variance"), f"{module} variance + eps")
    factor = ops.pow(mean, f"{module} reciprocal deviation")
    product = ops.mul(wide, factor, f"{module} normed in fp32", reduces=True)
    ops.tape.still_referenced(wide, mean)
    if weight:
        product = ops.times_fp32_weight(product, module, (width,), second=True)
    y = ops.cast(product, x.dtype, f"{module} output in {x.dtype}")
    ops.tape.still_referenced(x)
    return y


def fp32_layer_norm(ops: Operators, x: Tensor, module: str, weight: Shape) -> Tensor:
    """CohereLayerNorm: weight * normed in fp32, cast at the end; x - mean is computed twice."""
    wide = ops.cast(x, "fp32", f"{module} input in fp32")
    mean = ops.mean(wide, f"{module} mean")
    squares = ops.pow(ops.minus_rows(wide, mean, f"{module} distances to square"), f"{module} squares")
    variance = ops.mean(squares, f"{module} variance")
    centered = ops.minus_rows(wide, mean, f"{module} distances")
    shifted = ops.shift(variance, f"{module} variance + eps")
    deviation = ops.rsqrt(shifted, f"{module} reciprocal deviation")
    normed = ops.mul(centered, deviation, f"{module} normed", reduces=True)
    ops.tape.still_referenced(wide)
    y = ops.cast(ops.times_fp32_weight(normed, module, weight), x.dtype, f"{module} output in {x.dtype}")
    ops.tape.still_referenced(mean, variance)
    return y


def fp32_weight_rms_norm(ops: Operators, x: Tensor, module: str, width: str) -> Tensor:
    """NemotronHRMSNorm: weight.float() * normed in fp32, cast at the end."""
    variance, normed = ops.normed_with_variance(ops.cast(x, "fp32", f"{module} input in fp32"), module, None)
    y = ops.cast(ops.times_fp32_weight(normed, module, (width,)), x.dtype, f"{module} output in {x.dtype}")
    ops.tape.still_referenced(x, variance, normed)
    return y
