"""What an operator makes of fake tensors, asked of its meta kernel.

PyTorch's fake tensors (torch 2.13, _subclasses/fake_tensor.py, _dispatch_impl) do so, too, after they have looked for
constants, symbolic sizes and real tensors beside the fake ones; for that they load a good part of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memcalc.tracing.made import Known
from memcalc.tracing.plain_numbers import plain_numbers

aten = torch.ops.aten

META, CPU = torch.device("meta"), torch.device("cpu")

# What optimizers do to lists of tensors.
FOREACH = (
    *("abs", "add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "div", "exp", "lerp", "log", "maximum", "minimum"),
    *("mul", "neg", "norm", "pow", "reciprocal", "rsqrt", "sign", "sqrt", "sub", "zero"),
)


def overloads(*names: str) -> Iterator[Any]:
    """The overloads of these operators that make their outputs themselves."""
    for name in names:
        packet = getattr(aten, name)
        for overload in packet.overloads():
            if "out" not in overload and "names" not in overload.lower():
                yield getattr(packet, overload)


# What takes a device makes its tensor there.
MAKERS = frozenset(
    {
        *overloads("empty", "empty_strided", "zeros", "ones", "full", "rand", "randn", "arange", "randint", "_to_copy"),
        *overloads("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *overloads("new_empty", "new_zeros", "new_ones", "new_full"),
    }
)

# Kernels that do not look at the device (_refs, _decomp, _meta_registrations), and of which fake tensors have no rules
# but for symbols and for arguments on several devices. Of all others fake tensors are asked.
ASKED = MAKERS | frozenset(
    {
        # Views.
        *overloads("view", "_unsafe_view", "slice", "select", "t", "transpose", "permute", "expand", "unsqueeze"),
        *overloads("squeeze", "split", "split_with_sizes", "unbind", "detach", "alias", "as_strided"),
        # Copies.
        *overloads("clone", "copy_", "cat", "stack", "constant_pad_nd", "slice_backward", "select_backward"),
        # Element by element.
        *overloads("add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "pow", "neg", "reciprocal", "abs"),
        *overloads("exp", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf", "sigmoid", "clamp", "where"),
        *overloads("relu", "silu", "gelu", "softplus", "threshold_backward", "silu_backward", "gelu_backward"),
        *overloads("tanh_backward", "sigmoid_backward", "maximum", "minimum", "addcmul", "addcdiv", "lerp"),
        *overloads("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and"),
        *overloads("masked_fill", "triu", "tril", "native_dropout", "native_dropout_backward"),
        # In place.
        *overloads("add_", "sub_", "mul_", "div_", "neg_", "sqrt_", "clamp_", "addcmul_", "addcdiv_", "lerp_"),
        *overloads("masked_fill_", "scatter_", "scatter_add_", "index_copy_"),
        # Sums, products, choices.
        *overloads("sum", "mean", "amax", "cumsum", "linalg_vector_norm", "mm", "addmm", "bmm", "baddbmm"),
        *overloads("topk", "sort", "argmax", "gather", "scatter", "scatter_add", "index_select", "index_add"),
        # Layers and losses.
        *overloads("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
        *overloads("nll_loss_forward", "nll_loss_backward", "embedding", "embedding_dense_backward"),
        *overloads("native_layer_norm_backward"),
        *overloads("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
        *overloads("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"),
        # Lists, which optimizers update.
        *overloads(*(f"_foreach_{name}" for name in FOREACH)),
        *overloads(*(f"_foreach_{name}_" for name in FOREACH if name != "norm")),
    }
)


def of_meta_kernel(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[FakeTensor]
) -> Known | None:
    """The operator's outputs; None where PyTorch's fake tensors must be asked.

    Args:
        operator: of PyTorch, or one that stands in for PyTorch's.
        args: its arguments, numbers and fake tensors without constants.
        kwargs: likewise.
        given: the tensors among them.
    """
    if operator not in ASKED and operator.namespace != "memcalc":
        return None
    if len({tensor.fake_device for tensor in given}) > 1:
        return None
    device = given[0].fake_device if given else CPU
    if operator in MAKERS:
        device = kwargs.get("device") or device
        kwargs = {**kwargs, "device": META, "pin_memory": False} if "device" in kwargs or not given else kwargs
    with torch._C._DisableTorchDispatch(), plain_numbers():  # noqa: SLF001 -- no public name
        bare = [_bare(tensor) for tensor in given]
        rest = iter(bare)
        try:
            output = operator(*_with(args, rest), **dict(zip(kwargs, _with(kwargs.values(), rest), strict=True)))
        except Exception:  # noqa: BLE001 -- PyTorch is asked again, and may know better or say what is wrong
            return None
        return Known.of(operator, bare, output, device)


def _bare(tensor: FakeTensor) -> Tensor:
    """The meta tensor that a fake one is."""
    bare = torch.empty_strided((0,), (1,), dtype=tensor.dtype, device=META)
    return bare.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _with(values: Iterable[Any], bare: Iterator[Tensor]) -> list[Any]:
    """Arguments with the next of these in place of each tensor."""
    return [
        next(bare)
        if isinstance(value, Tensor)
        else type(value)(_with(value, bare))
        if isinstance(value, (list, tuple))
        else value
        for value in values
    ]
