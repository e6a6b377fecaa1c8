"""What CUDA operators allocate inside, which no formula of the papers knows: one rule a function, in bytes.

The rules are those of torch 2.13's sources (the file is named in each); where a rule was checked against the real
allocator of the CUDA build, its docstring says so. The first line of each docstring is the formula that reports show.
Values are the symbols of the run plus the card's `sms` (multiprocessors) and `threads` (of one multiprocessor).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

Values = Mapping[str, int]

MIB = 2**20


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def product(values: Values, axes: tuple[str, ...]) -> int:
    """The number of elements along several axes."""
    elements = 1
    for axis in axes:
        elements *= values[axis]
    return elements


def _power_of_two_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def column_sum(values: Values, rows: tuple[str, ...], columns: tuple[str, ...]) -> int:
    """staging and semaphores of a column sum split over thread blocks

    The gradient of a bias is a sum over all tokens. ATen native/cuda/Reduce.cuh (setReduceConfig, global_memory_size):
    when the grid is too small for the card, each column is summed by several blocks, which meet in a staging buffer.
    fp32 accumulators, contiguous 16-bit or fp32 input, vectors of four columns. Checked on torch 2.13 (CUDA 13).
    """
    summed, outputs = product(values, rows), product(values, columns)
    vector = 4
    while outputs % vector:
        vector //= 2
    lanes, depth = outputs // vector, summed  # d0 (along the columns), d1 (along the sum)
    threads = 512 // vector
    block_x = _power_of_two_below(lanes) if lanes < threads else threads
    block_y = _power_of_two_below(depth) if depth < threads else threads
    width = min(block_x, 32)
    height = min(block_y, threads // width)
    width = min(block_x, threads // height)
    outputs_per_step = width
    inputs_per_step = 1
    per_thread = summed
    if not (per_thread >= height * 16 or per_thread >= 256):
        return 0  # one row of threads sums a whole column: nothing is split
    inputs_per_step *= height
    target = values["sms"] * (values["threads"] // (width * height))
    grid = ceil_div(outputs // vector, outputs_per_step)
    per_thread = ceil_div(summed, inputs_per_step)
    if per_thread < 256 or grid > target:
        return 0
    splits = max(min(ceil_div(target, grid), ceil_div(per_thread, 16)), ceil_div(per_thread, 256))
    if splits <= 1:
        return 0
    accumulator_bytes = 4
    staging = accumulator_bytes * outputs * splits * width * vector
    semaphores = 4 * grid
    return _block(staging) + _block(semaphores)


def embedding_backward(values: Values, tokens: tuple[str, ...], rows: str, width: str) -> int:
    """sorted indices and partial sums of the embedding's backward: about 4·(N/10+min(N,V))·d

    ATen native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu: up to 3072 indices are added without temporaries;
    more are sorted and summed in segments, in fp32. The partial sums dominate. Checked on torch 2.13 (CUDA 13).
    """
    indices = product(values, tokens)
    if indices <= 3072:
        return 0
    segments = indices // 10 + min(indices, values[rows])
    index_bytes = 8
    sorting = 2 * index_bytes * indices  # sorted and original indices
    bounds = 2 * index_bytes * indices + 2 * index_bytes * min(indices, values[rows]) + index_bytes * segments
    partial_sums = 4 * segments * values[width]
    return sorting + bounds + partial_sums


def norm_backward(values: Values, rows: tuple[str, ...], width: str, item_bytes: int, buffers: int) -> int:
    """partial column sums of a norm's backward, beyond 65536 rows

    ATen native/cuda/layer_norm_kernel.cu, torch 2.8 and later: for many rows and few columns the gradients of weight
    and bias are first summed in R partial rows each, then these one after the other. Checked on torch 2.13 at its
    boundaries.
    """
    count, columns = product(values, rows), values[width]
    if count <= 65536 or columns // 32 >= values["sms"] // 2:
        return 0
    partial_rows = min(ceil_div(count, 32), MIB // columns)
    last_sum = column_sum({**values, "R": partial_rows, "N": columns}, ("R",), ("N",))
    return buffers * partial_rows * columns * item_bytes + last_sum


def flash_backward(values: Values, heads: str, kv_heads: str, head_dim: str, length: str, item_bytes: int) -> int:
    """fp32 accumulators of flash attention's backward: 4·b·h·s·(d_h+1), and k, v gradients at all h heads

    ATen native/transformers/cuda/flash_attn/flash_api.cpp (mha_bwd): row sums and the gradient of q in fp32, rows
    rounded up to 128 and the head dimension to 32 (to 64 beyond 128); with grouped heads the gradients of k and v
    are made for every query head first. Checked on torch 2.13.
    """
    b, h, kv, d, s = values["b"], values[heads], values[kv_heads], values[head_dim], values[length]
    rows = ceil_div(s, 128) * 128
    padded = ceil_div(d, 8) * 8
    rounded = ceil_div(padded, 32) * 32 if padded <= 128 else ceil_div(padded, 64) * 64
    row_sums = 4 * b * h * rows
    query_accumulator = 4 * b * h * rows * rounded
    expanded = 2 * item_bytes * b * s * h * padded if kv != h else 0
    return row_sums + query_accumulator + expanded


def efficient_backward(values: Values, heads: str, head_dim: str, length: str, item_bytes: int) -> int:
    """row sums and accumulators of memory-efficient attention's backward

    ATen native/transformers/cuda/attention_backward.cu and mem_eff_attention/kernel_backward.h (workspace_elements_gq,
    _gk, _gv): delta in fp32, and for each (batch, head) a workspace a block of queries; beyond a head dimension of 128,
    where 16-bit gradients of k and v no longer fit in registers, also one of each for every split of the keys.
    Checked on torch 2.13 for 16-bit inputs, and for fp32 of 128.
    """
    b, h, d, s = values["b"], values[heads], values[head_dim], values[length]
    delta = 4 * b * h * s
    if item_bytes == 4:
        accumulators = ceil_div(s, 64) * (256 * ceil_div(d, 8) * 8 + 16)
        return delta + b * h * accumulators + 4 * b * h * s * d  # the product gradient * output in fp32
    locks = 16  # of each tile: a lock, a counter, padding
    if d <= 64:
        accumulators = ceil_div(s, 64) * (4 * 64 * 64 + locks)
    elif d <= 128:
        accumulators = ceil_div(s, 128) * (4 * 128 * 128 + locks)
    else:  # blocks of 128 queries and 64 keys
        splits = max(min(ceil_div(s, 64), 200 // (b * h)), 1)
        keys_and_values = 2 * 4 * splits * 64 * ceil_div(d, 128) * 128
        accumulators = keys_and_values + ceil_div(s, 128) * ceil_div(d, 64) * (4 * 128 * 64 + locks)
    return delta + b * h * accumulators


def log_sum_exp_rows(values: Values, heads: str, length: str) -> int:
    """4·b·h·s, rows rounded up to 32 (memory-efficient attention keeps fp32 log-sum-exp)

    ATen native/transformers/cuda/attention.cu.
    """
    return 4 * values["b"] * values[heads] * ceil_div(values[length], 32) * 32


def named(rule: Callable[..., int], **arguments: object) -> partial[int]:
    """A rule with its axes filled in; reports read the rule's docstring through it."""
    filled = partial(rule, **arguments)
    filled.__doc__ = rule.__doc__
    return filled


def _block(size: int) -> int:
    return ceil_div(size, 512) * 512
