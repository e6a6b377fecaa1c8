"""Outputs of operators on fake tensors, from their meta kernels.

PyTorch's fake tensors (torch 2.13, _subclasses/fake_tensor.py, _dispatch_impl) call them too, after checks for
constants, symbolic sizes and mixed real tensors; for these checks they import much of PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memcalc.tracing.operator_outputs import OperatorOutputs

aten = torch.ops.aten

META, CPU = torch.device("meta"), torch.device("cpu")

# Operations of optimizers on lists of tensors.
FOREACH = (
    *("abs", "add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "div", "exp", "lerp", "log", "maximum", "minimum"),
    *("mul", "neg", "norm", "pow", "reciprocal", "rsqrt", "sign", "sqrt", "sub", "zero"),
)


def overloads(*names: str) -> Iterator[Any]:
    """Yield the overloads of these operators that return new outputs."""
    for name in names:
        packet = getattr(aten, name)
        for overload in packet.overloads():
            if "out" not in overload and "names" not in overload.lower():
                yield getattr(packet, overload)


# They create a tensor on the device that they are given.
MAKERS = frozenset(
    {
        *overloads("empty", "empty_strided", "zeros", "ones", "full", "rand", "randn", "arange", "randint", "_to_copy"),
        *overloads("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *overloads("new_empty", "new_zeros", "new_ones", "new_full"),
    }
)

# Kernels that ignore the device (_refs, _decomp, _meta_registrations), and for which fake tensors have no special rules
# except for symbols and arguments on several devices. All other operators go through fake tensors.
ASKED = MAKERS | frozenset(
    {
        # Views.
        *overloads("view", "_unsafe_view", "slice", "select", "t", "transpose", "permute", "expand", "unsqueeze"),
        *overloads("squeeze", "split", "split_with_sizes", "unbind", "detach", "alias", "as_strided"),
        # Copies.
        *overloads("clone", "copy_", "cat", "stack", "constant_pad_nd", "slice_backward", "select_backward"),
        # Elementwise.
        *overloads("add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "pow", "neg", "reciprocal", "abs"),
        *overloads("exp", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf", "sigmoid", "clamp", "where"),
        *overloads("relu", "silu", "gelu", "softplus", "threshold_backward", "silu_backward", "gelu_backward"),
        *overloads("tanh_backward", "sigmoid_backward", "maximum", "minimum", "addcmul", "addcdiv", "lerp"),
        *overloads("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and"),
        *overloads("masked_fill", "triu", "tril", "native_dropout", "native_dropout_backward"),
        # In place.
        *overloads("add_", "sub_", "mul_", "div_", "neg_", "sqrt_", "clamp_", "addcmul_", "addcdiv_", "lerp_"),
        *overloads("masked_fill_", "scatter_", "scatter_add_", "index_copy_"),
        # Reductions, matmuls, selections.
        *overloads("sum", "mean", "amax", "cumsum", "linalg_vector_norm", "mm", "addmm", "bmm", "baddbmm"),
        *overloads("topk", "sort", "argmax", "gather", "scatter", "scatter_add", "index_select", "index_add"),
        # Layers and losses.
        *overloads("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
        *overloads("nll_loss_forward", "nll_loss_backward", "embedding", "embedding_dense_backward"),
        *overloads("native_layer_norm_backward"),
        *overloads("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
        *overloads("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"),
        # Lists of tensors, in optimizers.
        *overloads(*(f"_foreach_{name}" for name in FOREACH)),
        *overloads(*(f"_foreach_{name}_" for name in FOREACH if name != "norm")),
    }
)


def of_meta_kernel(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[FakeTensor]
) -> OperatorOutputs | None:
    """Return the operator's outputs; None if PyTorch's fake tensors must compute them.

    Args:
        operator: of PyTorch, or memcalc's substitute for one.
        args: its arguments, numbers and fake tensors without constants.
        kwargs: its keyword arguments.
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
        except Exception:  # noqa: BLE001 -- PyTorch's fake tensors then either succeed or report the error
            return None
        return OperatorOutputs.of(operator, bare, output, device)


def _bare(tensor: FakeTensor) -> Tensor:
    """Return the meta tensor inside a fake tensor."""
    bare = torch.empty_strided((0,), (1,), dtype=tensor.dtype, device=META)
    return bare.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _with(values: Iterable[Any], bare: Iterator[Tensor]) -> list[Any]:
    """Return arguments with each tensor replaced by the next one of `bare`."""
    return [
        next(bare)
        if isinstance(value, Tensor)
        else type(value)(_with(value, bare))
        if isinstance(value, (list, tuple))
        else value
        for value in values
    ]


# PyTorch's Python kernels without the imports for symbolic sizes, which include a computer algebra system.
# The kernels call functions of torch.fx.experimental.symbolic_shapes, and use a class of sympy, even for plain
# numbers. Importing both takes longer than a small model's step (torch 2.13: _check_with, elementwise_dtypes,
# empty_like and others).

SYMBOLIC_SHAPES = "torch.fx.experimental.symbolic_shapes"


class NotPlainError(Exception):
    """A function got something other than a number, so PyTorch's own function is needed."""


class Symbol:
    """Stand-in for sympy.Basic; it has no instances."""


def known(value: Any) -> Any:
    """Return a bool or int unchanged; raise `NotPlainError` for anything else."""
    if type(value) not in (bool, int):
        raise NotPlainError
    return value


def equal(one: Any, other: Any) -> bool:
    """Return whether two numbers, or two sequences of sizes, are equal."""
    return bool(known(one) == known(other) if isinstance(one, int) else list(one) == list(other))


FUNCTIONS = {
    **dict.fromkeys(("guard_or_false", "guard_or_true", "guard_size_oblivious", "guard_int", "expect_true"), known),
    **dict.fromkeys(("statically_known_true", "guarding_hint_or_throw"), known),
    "has_guarding_hint": lambda _: True,
    "is_nested_int": lambda _: False,
    "sym_and": lambda *truths: all(map(known, truths)),
    "sym_or": lambda *truths: any(map(known, truths)),
    "sym_eq": equal,
}


def _stand_ins() -> dict[str, ModuleType]:
    shapes, algebra = ModuleType(SYMBOLIC_SHAPES), ModuleType("sympy")
    vars(shapes).update(FUNCTIONS)
    vars(algebra).update(Basic=Symbol)
    return {SYMBOLIC_SHAPES: shapes, "sympy": algebra}


STAND_INS = _stand_ins()


@contextmanager
def plain_numbers() -> Iterator[None]:
    """Replace PyTorch's imports for symbols by versions for plain numbers, unless the real ones are loaded.

    Any other use raises an ImportError or `NotPlainError`.
    """
    if SYMBOLIC_SHAPES in sys.modules:
        yield
        return
    with mock.patch.dict(sys.modules, STAND_INS):
        yield
