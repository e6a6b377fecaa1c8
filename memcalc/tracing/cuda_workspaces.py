"""Rules for the internal blocks of CUDA kernels, applied to an operator's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from memcalc.recorder.kernels import Hidden
from memcalc.workspaces import attention, ceil_div, linear_algebra, norms, sharding, sorting, transient
from memcalc.workspaces.attention import Heads
from memcalc.workspaces.multiprocessors import Multiprocessors
from memcalc.workspaces.reductions import ReductionShape, reduction

aten = torch.ops.aten

FOREACH_CHUNK = 65536  # elements: native/cuda/MultiTensorApply.cuh, kChunkSize

Rule = Callable[[Multiprocessors, tuple[Any, ...], Mapping[str, Any], Any], Sequence[Hidden]]


def _sum(gpu: Multiprocessors, args: tuple[Any, ...], _: Mapping[str, Any], output: Any) -> Sequence[Hidden]:
    """Return the blocks of one reduction of the input to the output: sum, mean, amax, norms."""
    x: Tensor = args[0]
    if not x.numel() or not isinstance(output, Tensor):
        return ()
    dims = args[1] if len(args) > 1 and args[1] is not None and args[1] != [] else list(range(x.dim()))
    script = (*_cast(x, output), *_reduced(x, [dims] if isinstance(dims, int) else list(dims), gpu))
    script += tuple(-size for size in _cast(x, output))
    return (Hidden(script),) if script else ()


def _cast(x: Tensor, output: Tensor) -> tuple[int, ...]:
    """Return the input's cast to the result's dtype; 16-bit inputs are summed in fp32 (native/ReduceOpsUtils.h)."""
    if x.dtype == output.dtype or (x.element_size() == 2 and output.dtype == torch.float32):
        return ()
    return (x.numel() * output.element_size(),)


def _reduced(x: Tensor, dims: list[int], gpu: Multiprocessors) -> tuple[int, ...]:
    """Return the script of a reduction over these dimensions of a contiguous tensor."""
    dims = sorted(dim % x.dim() for dim in dims) if x.dim() else []
    kept = [dim for dim in range(x.dim()) if dim not in dims and x.shape[dim] > 1]
    summed = [dim for dim in dims if x.shape[dim] > 1]
    inputs = prod(x.shape[dim] for dim in summed)
    outputs = prod(x.shape[dim] for dim in kept)
    order = sorted(range(x.dim()), key=lambda dim: (x.stride(dim), -dim))
    innermost = next((dim for dim in order if x.shape[dim] > 1), None)
    contiguous = innermost is None or innermost in summed
    inner = 1 if contiguous or innermost is None else _run(x, innermost, kept)
    runs = sum(1 for dim in summed if dim + 1 not in summed)
    return reduction(ReductionShape(outputs, inputs, contiguous, inner, one_dimension=runs <= 1), gpu)


def _run(x: Tensor, innermost: int, kept: list[int]) -> int:
    """Return the outputs' innermost extent after adjacent dimensions are merged."""
    extent, dim = x.shape[innermost], innermost - 1
    while dim in kept and x.stride(dim) == x.stride(innermost) * extent:
        extent *= x.shape[dim]
        dim -= 1
    return extent


def _pow(_: Multiprocessors, args: tuple[Any, ...], __: Mapping[str, Any], ___: Any) -> Sequence[Hidden]:
    """Return the block of pow(number, tensor): the number becomes an fp64 tensor on the device."""
    return () if isinstance(args[0], Tensor) else (Hidden((8, -8)),)


def _layer_norm(gpu: Multiprocessors, args: tuple[Any, ...], _: Mapping[str, Any], output: Any) -> Sequence[Hidden]:
    x, shape, weight = args[1], args[2], args[5]
    parameters = sum(1 for made in output[1:] if made is not None)
    return _norm(gpu, x, shape, weight, parameters)


def _rms_norm(gpu: Multiprocessors, args: tuple[Any, ...], _: Mapping[str, Any], output: Any) -> Sequence[Hidden]:
    x, shape, weight = args[1], args[2], args[4]
    return _norm(gpu, x, shape, weight, 0 if output[1] is None else 1)


def _norm(
    gpu: Multiprocessors, x: Tensor, shape: Sequence[int], weight: Tensor | None, parameters: int
) -> Sequence[Hidden]:
    columns = prod(shape)
    item = x.element_size() if weight is None else weight.element_size()
    script = norms.norm_backward(x.numel() // columns, columns, item, parameters, gpu)
    return _beside_copy(x, (Hidden(script),) if script else ())


def _norm_input(_: Multiprocessors, args: tuple[Any, ...], __: Mapping[str, Any], ___: Any) -> Sequence[Hidden]:
    return _beside_copy(args[0], ())


def _beside_copy(x: Tensor, hidden: Sequence[Hidden]) -> Sequence[Hidden]:
    """Return a norm's blocks, plus a copy of a non-contiguous input (native/cuda/layer_norm_kernel.cu)."""
    if x.is_contiguous():
        return hidden
    size = x.numel() * x.element_size()
    return (Hidden((size,), at=0), *hidden, Hidden((-size,)))


def _where(_: Multiprocessors, args: tuple[Any, ...], __: Mapping[str, Any], output: Any) -> Sequence[Hidden]:
    """Return the blocks of numbers, which become tensors on the device (native/TensorCompare.cpp, where_self_out)."""
    size = output.element_size()
    numbers = sum(not isinstance(side, Tensor) for side in args[1:])
    return (Hidden((size,) * numbers, at=0), Hidden((-size,) * numbers)) if numbers else ()


def _softmax_backward(_: Multiprocessors, args: tuple[Any, ...], __: Mapping[str, Any], ___: Any) -> Sequence[Hidden]:
    """Return the block of gradient * output, in their dtype; the result may be fp16 (native/cuda/SoftMax.cu)."""
    size = args[0].numel() * args[0].element_size()
    return (Hidden((size, -size)),)


def _safe_softmax(_: Multiprocessors, __: tuple[Any, ...], ___: Mapping[str, Any], output: Any) -> Sequence[Hidden]:
    """Return the masks of -inf scores and fully masked rows, and their zero (native/transformers/attention.cpp)."""
    masked, rows = output.numel(), output.numel() // output.shape[-1]
    return (Hidden(transient(masked, rows, 4)),)


def _svd(_: Multiprocessors, args: tuple[Any, ...], __: Mapping[str, Any], ___: Any) -> Sequence[Hidden]:
    x: Tensor = args[0]
    return (Hidden(linear_algebra.decomposition(x.shape[-2], x.shape[-1], x.element_size())),)


def _foreach_norm(_: Multiprocessors, args: tuple[Any, ...], __: Mapping[str, Any], ___: Any) -> Sequence[Hidden]:
    """Return the block of the norms of each chunk of each tensor, in fp32 (native/cuda/ForeachReduceOp.cu)."""
    chunks = max(ceil_div(x.numel(), FOREACH_CHUNK) for x in args[0])
    size = 4 * len(args[0]) * chunks
    return (Hidden((size,), at=0), Hidden((-size,)))


def _sort(gpu: Multiprocessors, args: tuple[Any, ...], _: Mapping[str, Any], output: Any) -> Sequence[Hidden]:
    values: Tensor = output[0]
    dims = [value for value in args[1:] if isinstance(value, int) and not isinstance(value, bool)]
    length = values.shape[dims[0] if dims else -1] if values.dim() else 1
    script = sorting.sort(values.numel() // max(length, 1), length, values.element_size(), gpu.major)
    return (Hidden(script),) if script else ()


def _index_put(gpu: Multiprocessors, args: tuple[Any, ...], _: Mapping[str, Any], __: Any) -> Sequence[Hidden]:
    indices = [index for index in args[1] if index is not None]
    accumulate = len(args) > 3 and args[3]
    if not accumulate or len(indices) != 1 or indices[0].dtype == torch.bool:
        return ()
    position = next(position for position, index in enumerate(args[1]) if index is not None)
    checked = len(args) < 5 or not args[4]
    return (Hidden(sorting.scatter_add(indices[0].numel(), args[0].shape[position], gpu.major, checked=checked)),)


def _embedding(gpu: Multiprocessors, args: tuple[Any, ...], __: Mapping[str, Any], ___: Any) -> Sequence[Hidden]:
    gradient, indices, rows = args[:3]
    count, width = indices.numel(), gradient.shape[-1]
    before = sorting.before_gradient(count, rows, gpu.major)
    return (Hidden(before, at=0), Hidden(sorting.after_gradient(count, rows, width))) if before else ()


def _flash(gpu: Multiprocessors, args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any) -> Sequence[Hidden]:
    dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
    inside, after = attention.flash_forward(_heads(*args[:2]), dropout, gpu.count)
    return tuple(hidden for hidden in (Hidden(inside, at=2), Hidden(after)) if hidden.script)


def _flash_backward(_: Multiprocessors, args: tuple[Any, ...], __: Mapping[str, Any], ___: Any) -> Sequence[Hidden]:
    """Return the kernel's blocks, beside contiguous copies of the output and its gradient (attention_backward.cu)."""
    found = Hidden(attention.flash_backward(_heads(*args[1:3])))
    copies = [x.numel() * x.element_size() for x in (args[0], args[4]) if not _tokens_first(x)]
    if not copies:
        return (found,)
    return Hidden(tuple(copies), at=0), found, Hidden(tuple(-size for size in copies))


def _tokens_first(x: Tensor) -> bool:
    """Return whether a tensor (b, h, s, d) is contiguous as (b, s, h, d); `is_contiguous` of fake ones loads SymPy."""
    _, h, s, d = x.shape
    strides = zip(x.shape, x.stride(), (s * h * d, d, h * d, 1), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in strides)


def _efficient(_: Multiprocessors, args: tuple[Any, ...], __: Mapping[str, Any], ___: Any) -> Sequence[Hidden]:
    script = attention.efficient_forward(_heads(*args[:3]))
    return (Hidden(script),) if script else ()


def _efficient_backward(_: Multiprocessors, args: tuple[Any, ...], __: Mapping[str, Any], ___: Any) -> Sequence[Hidden]:
    return (Hidden(attention.efficient_backward(_heads(*args[1:4]))),)


def _heads(query: Tensor, key: Tensor, value: Tensor | None = None) -> Heads:
    b, h, s, d = query.shape
    values = None if value is None else value.shape[3]
    return Heads(b, h, key.shape[1], s, key.shape[2], d, query.element_size(), values)


def _split_copy(gpu: Multiprocessors, args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any) -> Sequence[Hidden]:
    gathered, sizes = args[:2]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    before, behind = prod(gathered.shape[:dim]), prod(gathered.shape[dim + 1 :])
    parts = [size * behind * gathered.element_size() for size in sizes]
    return (Hidden(sharding.split_copy(parts, before, gpu)),)


def _chunk_cat(_: Multiprocessors, args: tuple[Any, ...], kwargs: Mapping[str, Any], __: Any) -> Sequence[Hidden]:
    gradients, dim, ranks = args[:3]
    item = kwargs["out"].element_size() if "out" in kwargs else args[3].element_size()
    parts = [ceil_div(x.shape[dim], ranks) * prod(x.shape[dim + 1 :]) * item for x in gradients]
    return (Hidden(sharding.chunk_cat(parts)),)


WORKSPACES: dict[Any, Rule] = {
    aten.sum: _sum,
    aten.mean: _sum,
    aten.linalg_vector_norm: lambda gpu, args, kwargs, output: _sum(gpu, (args[0], *args[2:3]), kwargs, output),
    aten.pow: _pow,
    aten.where: _where,
    aten.native_layer_norm: _norm_input,
    torch.ops.memcalc._fused_rms_norm: _norm_input,  # noqa: SLF001
    aten.native_layer_norm_backward: _layer_norm,
    torch.ops.memcalc._fused_rms_norm_backward: _rms_norm,  # noqa: SLF001 -- operators' names, here and below
    aten._safe_softmax: _safe_softmax,  # noqa: SLF001
    aten._linalg_svd: _svd,  # noqa: SLF001
    aten._foreach_norm: _foreach_norm,  # noqa: SLF001
    aten.sort: _sort,
    aten.index_put: _index_put,
    aten._index_put_impl_: _index_put,
    aten._softmax_backward_data: _softmax_backward,  # noqa: SLF001
    aten.embedding_dense_backward: _embedding,
    aten._scaled_dot_product_flash_attention: _flash,  # noqa: SLF001
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,  # noqa: SLF001
    aten._scaled_dot_product_efficient_attention: _efficient,  # noqa: SLF001
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,  # noqa: SLF001
}


def sharding_rules() -> None:
    """Add the rules of FSDP2's operators, which exist once FSDP2 is imported."""
    WORKSPACES.update({torch.ops.fsdp.split_with_sizes_copy: _split_copy, torch.ops.fsdp.chunk_cat: _chunk_cat})
