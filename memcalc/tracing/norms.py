"""RMSNorm as one CUDA kernel; on the CPU it is a sequence of operators with separate outputs.

Source: torch 2.9 and later, aten/src/ATen/native/layer_norm.cpp (rms_norm_symint) and cuda/layer_norm_kernel.cu
(_fused_rms_norm_cuda): the output and an fp32 reciprocal root per row; backward returns the gradients of the input
and the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LIBRARY = torch.library.Library("memcalc", "DEF")  # type: ignore[no-untyped-call]
RMS_NORM = ("_fused_rms_norm", "_fused_rms_norm_backward")  # PyTorch's operators that memcalc's replace
FORWARD = "_fused_rms_norm(Tensor x, int[] shape, Tensor? weight, float? eps) -> (Tensor, Tensor)"
BACKWARD = (
    "_fused_rms_norm_backward(Tensor g, Tensor x, int[] shape, Tensor rstd, Tensor? weight, bool trains)"
    " -> (Tensor, Tensor?)"
)
LIBRARY.define(FORWARD)  # type: ignore[no-untyped-call]
LIBRARY.define(BACKWARD)  # type: ignore[no-untyped-call]


def _forward(x: Tensor, shape: Sequence[int], _weight: Tensor | None, _eps: float | None) -> tuple[Tensor, Tensor]:
    rows = x.shape[: x.dim() - len(shape)]
    statistics = (*rows, *(1 for _ in shape))
    return x.new_empty(x.shape), x.new_empty(statistics, dtype=torch.float32)


def _backward(
    _grad: Tensor, x: Tensor, _shape: Sequence[int], _rstd: Tensor, weight: Tensor | None, trains: bool
) -> tuple[Tensor, Tensor | None]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape) if weight is not None and trains else None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, shape, weight, _ = inputs
    ctx.shape = shape
    ctx.save_for_backward(x, output[1], weight)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    x, rstd, weight = ctx.saved_tensors
    backward, trains = torch.ops.memcalc._fused_rms_norm_backward, ctx.needs_input_grad[2]  # noqa: SLF001
    grad_x, grad_weight = backward(grad, x, ctx.shape, rstd, weight, trains)
    del rstd, weight, x  # in the order in which the C++ node's locals are destroyed
    return grad_x, None, grad_weight, None


torch.library.register_fake("memcalc::_fused_rms_norm", _forward, lib=LIBRARY)
torch.library.register_fake("memcalc::_fused_rms_norm_backward", _backward, lib=LIBRARY)
torch.library.register_autograd("memcalc::_fused_rms_norm", _differentiate, setup_context=_save, lib=LIBRARY)


def rms_norm(
    input: Tensor,  # noqa: A002 -- PyTorch's signature
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Run torch.nn.functional.rms_norm on a CUDA device. A weight of another dtype has no kernel (layer_norm.cpp)."""
    if weight is not None and weight.dtype != input.dtype:
        return functional.rms_norm(input, normalized_shape, weight, eps)
    output: Tensor = torch.ops.memcalc._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]  # noqa: SLF001
    return output
