"""Workspaces of CUDA operators in bytes, as formulas of a run's symbols: `memcalc.workspaces` with symbols.

The first line of each docstring is the formula that reports show. Values are the run's symbols plus the GPU's `sms`
(multiprocessors), `threads` (per multiprocessor) and `major` (compute capability). Every buffer inside an operator is
a separate allocation, so it counts in whole allocator blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from math import prod
from typing import Any

from memcalc.allocator.pytorch.block_sizes import blocks
from memcalc.workspaces import (
    Script,
    attention,
    ceil_div,
    most,
    norms,
    reductions,
    ring_attention,
    round_up,
    sorting,
)
from memcalc.workspaces.multiprocessors import Multiprocessors
from memcalc.workspaces.ring_attention import Ring, Rotation

Values = Mapping[str, int]


def most_of(script_of: Callable[..., Script]) -> Callable[..., int]:
    """Return the rule for the peak bytes of a script, with each buffer rounded up to allocator blocks."""

    @wraps(script_of)
    def rule(values: Values, *given: Any, **named: Any) -> int:
        return most(blocks(script_of(values, *given, **named)))

    return rule


def script_of(rule: Callable[[Values], int], values: Values) -> Script:
    """Return the buffers that a rule adds up; for a rule without a script, one buffer that stays allocated."""
    assert isinstance(rule, partial)
    script: Callable[..., Script] | None = getattr(rule.func, "__wrapped__", None)
    return (rule(values),) if script is None else script(values, **rule.keywords)


def product(values: Values, axes: tuple[str, ...]) -> int:
    """Return the number of elements along several axes."""
    return prod(map(values.__getitem__, axes))


@most_of
def column_sum(values: Values, rows: tuple[str, ...], columns: tuple[str, ...]) -> Script:
    """staging buffer and semaphores of a column sum split across thread blocks

    The gradient of a bias is a sum over all tokens. ATen native/cuda/Reduce.cuh: when the grid is too small for the
    GPU, several thread blocks sum each column and exchange partial sums in a staging buffer.
    """
    return reductions.column_sum(product(values, rows), product(values, columns), _gpu(values))


def sorted_indices(values: Values, tokens: tuple[str, ...], rows: str) -> int:
    """sorted indices of the embedding's backward: 16·N beyond 3072 tokens

    ATen native/cuda/Embedding.cu: up to 3072 indices are added without temporaries; more are sorted before the gradient
    is computed.
    """
    script = sorting.before_gradient(product(values, tokens), values[rows], values["major"])
    return sum(blocks(script))


def _sorted_indices(values: Values, tokens: tuple[str, ...], rows: str) -> Script:
    return sorting.before_gradient(product(values, tokens), values[rows], values["major"])


sorted_indices.__wrapped__ = _sorted_indices  # type: ignore[attr-defined] # see `script_of`


@most_of
def embedding_backward(values: Values, tokens: tuple[str, ...], rows: str, width: str) -> Script:
    """partial sums of the embedding's backward: about 4·(N/10+min(N,V))·d

    ATen native/cuda/EmbeddingBackwardKernel.cu: beyond 3072 indices gradients are summed in segments, in fp32.
    """
    return sorting.after_gradient(product(values, tokens), values[rows], values[width])[:-2]  # without sorted indices


@most_of
def norm_backward(values: Values, rows: tuple[str, ...], width: str, item_bytes: int, buffers: int) -> Script:
    """partial column sums of a norm's backward, beyond 65536 rows

    ATen native/cuda/layer_norm_kernel.cu, torch 2.8 and later: for many rows and few columns, the gradients of weight
    and bias are first summed in partial rows, then those rows are summed sequentially.
    """
    return norms.norm_backward(product(values, rows), values[width], item_bytes, buffers, _gpu(values))


def sums_of_blocks(values: Values, rows: tuple[str, ...], width: str, block: int) -> int:
    """fp32 column sums of each block of rows"""
    return 4 * -(-product(values, rows) // block) * values[width]


@most_of
def liger_norm_backward(values: Values, width: str) -> Script:
    """4·sms·d: an RMSNorm's weight gradient summed per multiprocessor, and 4·d: their sum

    liger-kernel 0.8 ops/rms_norm.py, rms_norm_backward: `_dW`, then `_dW.sum(dim=0)`, both in fp32.
    """
    columns = values[width]
    return (4 * values["sms"] * columns, 4 * columns)


@most_of
def flash_forward(
    values: Values, heads: str, kv_heads: str, head_dim: str, length: str, item_bytes: int, keys: str | None = None
) -> Script:
    """fp32 outputs and row sums of flash attention's splits: 4·splits·b·h·s·(d_h+1), where queries do not fill the GPU

    ATen native/transformers/cuda/flash_attn/flash_api.cpp (set_params_splitkv), without dropout: the keys are split
    across thread blocks where batch, heads and blocks of 64 queries are fewer than 0.8 times twice the multiprocessors.
    A single query of grouped heads is treated as one query for each head of a group (seqlenq_ngroups_swapped).
    """
    heads_of_call = _heads(values, heads, kv_heads, head_dim, length, item_bytes)
    if keys is not None:
        heads_of_call = heads_of_call._replace(t=values[keys])
        if heads_of_call.s == 1 and heads_of_call.h > heads_of_call.kv:
            heads_of_call = heads_of_call._replace(h=heads_of_call.kv, s=heads_of_call.h // heads_of_call.kv)
    taken, given_back = attention.flash_forward(heads_of_call, 0.0, values["sms"])
    return taken + given_back


@most_of
def flash_backward(values: Values, heads: str, kv_heads: str, head_dim: str, length: str, item_bytes: int) -> Script:
    """fp32 accumulators of flash attention's backward: 4·b·h·s·(d_h+1), and k, v gradients at all h heads

    ATen native/transformers/cuda/flash_attn/flash_api.cpp (mha_bwd): row sums and the gradient of q in fp32, rows
    rounded up to 128 and the head dimension to 32 (to 64 beyond 128). With grouped heads, gradients of k and v are
    first computed for every query head.
    """
    return attention.flash_backward(_heads(values, heads, kv_heads, head_dim, length, item_bytes))


@most_of
def ring_forward(
    values: Values, heads: str, kv_heads: str, head_dim: str, length: str, item_bytes: int, rotation: Rotation
) -> Script:
    """blocks of ring attention in forward: keys and values of other ranks, and outputs merged in fp32

    torch 2.13 distributed/tensor/experimental/_context_parallel/_attention.py (_templated_ring_attention).
    """
    ring = Ring(values["c"], rotation, values["c_i"])
    return ring_attention.forward(_heads(values, heads, kv_heads, head_dim, length, item_bytes), ring, values["sms"])


@most_of
def ring_backward(
    values: Values, heads: str, kv_heads: str, head_dim: str, length: str, item_bytes: int, rotation: Rotation
) -> Script:
    """blocks of ring attention in backward: keys and values of other ranks, and gradients summed in fp32

    torch 2.13 distributed/tensor/experimental/_context_parallel/_attention.py (_templated_ring_attention_backward).
    """
    ring = Ring(values["c"], rotation, values["c_i"])
    return ring_attention.backward(_heads(values, heads, kv_heads, head_dim, length, item_bytes), ring)


def ring_output_by_token(values: Values, heads: str, head_dim: str, length: str, item_bytes: int) -> int:
    """copy of ring attention's output by token: b·s·h·d_h elements

    The last rank's output has that order already: it is not a concatenation of halves by head
    (_SDPAMerger.results).
    """
    elements = product(values, ("b", length, heads, head_dim))
    return 0 if values["c_i"] == values["c"] - 1 else elements * item_bytes


@most_of
def efficient_forward(
    values: Values, heads: str, head_dim: str, value_dim: str, length: str, item_bytes: int
) -> Script:
    """fp32 accumulator of memory-efficient attention's output for heads larger than 128: 4·b·h·s·d_v

    ATen native/transformers/cuda/mem_eff_attention/kernel_forward.h (kNeedsOutputAccumulatorBuffer).
    """
    sizes = _heads(values, heads, heads, head_dim, length, item_bytes)
    return attention.efficient_forward(sizes._replace(values=values[value_dim]))


@most_of
def efficient_backward(
    values: Values, heads: str, head_dim: str, value_dim: str, length: str, item_bytes: int
) -> Script:
    """row sums and accumulators of memory-efficient attention's backward

    ATen native/transformers/cuda/attention_backward.cu and mem_eff_attention/kernel_backward.h: the rows' products in
    fp32, and for each (batch, head) a workspace per block of queries. Beyond a head dimension of 128, bf16 and fp16
    gradients of k and v no longer fit in registers, so every split of the keys has a workspace for both.
    """
    sizes = _heads(values, heads, heads, head_dim, length, item_bytes)
    return attention.efficient_backward(sizes._replace(values=values[value_dim]))


def mask_in_dtype(values: Values, length: str, item_bytes: int, heads: str = "1") -> int:
    """a mask in the dtype of the queries: b·s² elements (per head, if heads differ), rows padded to a multiple of 8

    ATen native/transformers/attention.cpp: convert_boolean_attn_mask, preprocess_mask and pad_bias<8>.
    """
    return item_bytes * values["b"] * values[heads] * values[length] * round_up(values[length], 8)


def mask_before_padding(values: Values, length: str, item_bytes: int, heads: str = "1") -> int:
    """the mask before its rows are padded, if they need padding

    ATen native/transformers/attention.cpp.
    """
    aligned = values[length] % 8 == 0
    return 0 if aligned else item_bytes * values["b"] * values[heads] * values[length] * values[length]


def mask_of_rows_in_eights(values: Values, length: str, item_bytes: int, heads: str) -> int:
    """the mask where rows need no padding: b·h·s² elements

    ATen native/transformers/attention.cpp.
    """
    return mask_in_dtype(values, length, item_bytes, heads) if values[length] % 8 == 0 else 0


def padded_mask(values: Values, length: str, item_bytes: int, heads: str) -> int:
    """a mask per head, where rows are padded to a multiple of 8

    ATen native/transformers/attention.cpp: pad_bias<8>.
    """
    return 0 if values[length] % 8 == 0 else mask_in_dtype(values, length, item_bytes, heads)


def log_sum_exp_rows(values: Values, heads: str, length: str) -> int:
    """4·b·h·s, rows rounded up to 32 (memory-efficient attention keeps fp32 log-sum-exp)

    ATen native/transformers/cuda/attention.cu.
    """
    return 4 * values["b"] * values[heads] * round_up(values[length], 32)


def mxfp8_scales(values: Values, axes: tuple[str, ...]) -> int:
    """one byte per 32 elements"""
    return product(values, axes) // 32


def block_scales(values: Values, along: tuple[str, ...], across: tuple[str, ...]) -> int:
    """4 bytes per 128 elements along one axis, the other axis rounded up to a multiple of 4

    Transformer Engine 2.11 pytorch/tensor/float8_blockwise_tensor.py: get_scale_shape, blocks of 1 x 128.
    """
    return 4 * ceil_div(product(values, along), 128) * round_up(product(values, across), 4)


@most_of
def sort_row(values: Values, length: tuple[str, ...]) -> Script:
    """8·N and CUB's scratch: positions before sorting

    ATen native/cuda/Sort.cu, of one row of int64.
    """
    return sorting.sort(1, product(values, length), sorting.INDEX, values["major"])


@most_of
def add_rows(values: Values, indices: tuple[str, ...], rows: tuple[str, ...]) -> Script:
    """about 4·8·N and CUB's scratch: sorted indices, to sum rows with the same target

    ATen native/cuda/Indexing.cu, index_put_with_sort_kernel.
    """
    count, targets = product(values, indices), product(values, rows)
    return sorting.scatter_add(count, targets, values["major"], checked=False)


def named(rule: Callable[..., int], **arguments: object) -> partial[int]:
    """Return a rule with its axes filled in; reports read the rule's docstring through it."""
    filled = partial(rule, **arguments)
    filled.__doc__ = rule.__doc__
    return filled


def _gpu(values: Values) -> Multiprocessors:
    return Multiprocessors(values["sms"], values["threads"], values["major"])


def _heads(values: Values, heads: str, kv_heads: str, head_dim: str, length: str, item_bytes: int) -> attention.Heads:
    s = values[length]
    return attention.Heads(values["b"], values[heads], values[kv_heads], s, s, values[head_dim], item_bytes)
