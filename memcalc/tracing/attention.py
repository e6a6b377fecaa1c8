"""scaled_dot_product_attention as on CUDA: the selected kernel, and what it saves for backward.

On the CPU PyTorch selects other kernels, which save other tensors. Source: torch 2.13,
aten/src/ATen/native/transformers/attention.cpp (scaled_dot_product_attention, pad_last_dim, post_process_flash_output)
and cuda/sdp_utils.cpp (kernel selection). cuDNN's kernel, which newer GPUs prefer, is omitted: it saves tensors of the
same sizes as flash.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memcalc.spec.hardware.kernels import FLASH_LARGEST_HEAD

FLASH_DTYPES = (torch.float16, torch.bfloat16)
AMPERE = (8, 0)  # sdp_utils.cpp: required by flash, and by memory-efficient attention in bf16
NO_KERNEL = "No available kernel. Aborting execution."
MULTIPLE = 8  # elements: flash pads heads to it, the efficient kernel the rows of a mask: attention.cpp


def attention(  # noqa: D417, PLR0917 -- PyTorch's signature
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run torch.nn.functional.scaled_dot_product_attention on (b, h, s, d) tensors of a CUDA device.

    Args:
        capability: compute capability of the GPU; the other arguments are PyTorch's.

    Raises:
        RuntimeError: with PyTorch's message: no enabled kernel can run.
    """
    grouped = not _same_heads(query, key, value)
    if (enable_gqa or not grouped) and capability >= AMPERE and _flash(query, key, value, attn_mask):
        return _run_flash(query, key, value, dropout_p, is_causal, scale)
    math = torch.backends.cuda.math_sdp_enabled()  # type: ignore[no-untyped-call]
    # The kernel rejects grouped heads. Alone it stands for older releases of transformers, which repeat them.
    efficient = torch.backends.cuda.mem_efficient_sdp_enabled() and (  # type: ignore[no-untyped-call]
        not grouped or (enable_gqa and not math)
    )
    if efficient and query.dim() == 4 and (capability >= AMPERE or query.dtype != torch.bfloat16):
        if enable_gqa:
            key, value = _repeated(key, query), _repeated(value, query)
        return _run_efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if not math:
        raise RuntimeError(NO_KERNEL)
    return _run_math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _same_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the numbers of heads are equal.

    Fused kernels do not broadcast heads (sdp_utils_cpp.h, check_batch_size_and_num_heads_dense); the math kernel does.
    """
    return query.dim() != 4 or query.shape[1] == key.shape[1] == value.shape[1]


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    enabled: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    return (
        enabled
        and mask is None
        and query.dim() == 4
        and query.dtype in FLASH_DTYPES
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= FLASH_LARGEST_HEAD
    )


def _run_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    padding = -width % MULTIPLE
    if padding:
        query, key, value = (functional.pad(each, (0, padding)) for each in (query, key, value))
    output = _first(
        torch.ops.aten._scaled_dot_product_flash_attention(  # noqa: SLF001 -- the kernel's only name
            query, key, value, dropout, causal, return_debug_mask=False, scale=scale
        )
    )
    return output[..., :width] if padding else output


def _run_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    if mask is not None:
        mask = _additive(mask, query)
        if mask.stride(-2) % MULTIPLE:  # attention.cpp, preprocess_mask and pad_bias<8>: rows must be aligned
            mask = functional.pad(mask, (0, -mask.shape[-1] % MULTIPLE))[..., : mask.shape[-1]]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs_backward = any(each.requires_grad for each in (query, key, value))
    return _first(
        torch.ops.aten._scaled_dot_product_efficient_attention(  # noqa: SLF001 -- as above
            query, key, value, mask, torch.is_grad_enabled() and needs_backward, dropout, causal, scale=scale
        )
    )


def _run_math(  # noqa: PLR0917 -- as above
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """Run the operators of _scaled_dot_product_attention_math, which masks fake scores in a new tensor."""
    dtype = query.dtype
    if mask is not None:
        mask = _additive(mask, query)
    wide_query, wide_key, wide_value = (
        each.float() if each.dtype in FLASH_DTYPES else each for each in (query, key, value)
    )
    factor = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scaled = wide_query * factor
    if causal:
        mask = _additive(query.new_ones((query.shape[-2], key.shape[-2]), dtype=torch.bool).tril(), scaled)
    all_keys, all_values = wide_key, wide_value
    if grouped:
        all_keys, all_values = _repeated(wide_key, query), _repeated(wide_value, query)
    scores = scaled @ (all_keys.transpose(-2, -1) * factor)
    if mask is not None:
        scores += mask
    scores = torch.ops.aten._safe_softmax(scores, -1)  # noqa: SLF001 -- the operator's only name
    if dropout:
        scores = torch.native_dropout(scores, dropout, True)[0]
    returned = scores.to(dtype)  # the second result, which the caller drops
    output: Tensor = (scores @ all_values).to(dtype)
    del returned
    return output


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask that is added to scores, in the dtype of `like` (attention.cpp, convert_boolean_attn_mask)."""
    if mask.dtype != torch.bool:
        return mask
    kept, hidden = like.new_full((), 0.0), like.new_full((), -torch.inf)
    return torch.where(mask, kept, hidden)


def _first(outputs: tuple[Any, ...]) -> Tensor:
    """Return the first output; the others are freed in the order in which C++ destroys a tuple."""
    waiting = list(outputs)
    del outputs
    first: Tensor = waiting.pop(0)
    while waiting:
        del waiting[0]
    return first


def _repeated(heads: Tensor, query: Tensor) -> Tensor:
    repeats = query.shape[-3] // heads.shape[-3]
    return heads if repeats == 1 else heads.repeat_interleave(repeats, dim=-3)
