"""Workspaces of fused attention. Shapes: b batch, h query heads, kv KV heads, s queries, t keys, d.

Flash: ATen native/transformers/cuda/flash_attn/flash_api.cpp; checked against the real allocator over 120 random shapes
on torch 2.6 to 2.13. Memory-efficient: cuda/attention.cu, attention_backward.cu, mem_eff_attention/kernel_backward.h.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.workspaces import Script, ceil_div, round_up, transient

FP32 = 4
RANDOM_STATE = 16  # bytes of the seed and offset of a kernel with dropout


class Heads(NamedTuple):
    """The sizes of one call."""

    b: int  # batch
    h: int  # query heads
    kv: int  # KV heads
    s: int  # queries per sequence
    t: int  # keys per sequence
    d: int  # head dimension of queries and keys
    item_bytes: int  # bytes per element
    values: int | None = None  # head dimension of values; None: the same as `d`

    @property
    def d_v(self) -> int:
        """Head dimension of values and outputs."""
        return self.d if self.values is None else self.values


def flash_forward(sizes: Heads, dropout: float, multiprocessors: int) -> tuple[Script, Script]:
    """Return the scripts between the outputs (output and log-sum-exp) and the random state, and after it."""
    if dropout:
        return (), transient(RANDOM_STATE)
    splits = flash_splits(sizes, multiprocessors)
    if splits == 1:
        return (), ()
    sums = FP32 * splits * sizes.b * sizes.h * sizes.s
    outputs = FP32 * splits * sizes.b * sizes.h * sizes.s * rounded_head(sizes.d)
    return (sums, outputs), (-sums, -outputs)


def flash_splits(sizes: Heads, multiprocessors: int) -> int:
    """Return the number of splits of the keys if the queries alone do not fill the GPU (num_splits_heuristic)."""
    blocks = sizes.b * sizes.h * ceil_div(sizes.s, 64)
    places = 2 * multiprocessors
    if blocks >= 0.8 * places:
        return 1
    width = 256 if sizes.d <= 64 else 128 if sizes.d <= 128 else 64
    parts = ceil_div(sizes.t, width)
    candidates = [
        n for n in range(1, min(128, places, parts) + 1) if n == 1 or ceil_div(parts, n) != ceil_div(parts, n - 1)
    ]
    efficiency = {n: (blocks * n / places) / ceil_div(blocks * n, places) for n in candidates}
    best = max(efficiency.values())
    return next(n for n in candidates if efficiency[n] >= 0.85 * best)


def rounded_head(d: int) -> int:
    """Return the head dimension of flash's accumulators: in steps of 32, beyond 128 of 64 (torch 2.11 and later)."""
    padded = round_up(d, 8)
    return round_up(padded, 32) if padded <= 128 else round_up(padded, 64)


def flash_backward(sizes: Heads) -> Script:
    """Return the script after the gradients of q, k and v: row sums, q's fp32 gradient; for GQA, k's and v's."""
    rows = round_up(sizes.s, 128)
    row_sums = FP32 * sizes.b * sizes.h * rows
    accumulator = FP32 * sizes.b * sizes.h * rows * rounded_head(sizes.d)
    expanded = sizes.item_bytes * sizes.b * sizes.t * sizes.h * round_up(sizes.d, 8) if sizes.kv != sizes.h else 0
    return transient(row_sums, accumulator, expanded, expanded)


def efficient_forward(sizes: Heads) -> Script:
    """Return the script of an fp32 output accumulator, needed if keys or values are larger than 128."""
    wide = max(sizes.d, sizes.d_v) > 128 and sizes.item_bytes < FP32
    return transient(FP32 * sizes.b * sizes.s * sizes.h * sizes.d_v) if wide else ()


def efficient_backward(sizes: Heads) -> Script:
    """Return the script after the gradients of q, k and v: row-wise products (delta) and gradient accumulators."""
    delta = FP32 * sizes.b * sizes.h * sizes.s
    workspace = sizes.b * sizes.h * _accumulators(sizes)
    product: Script = ()
    if sizes.item_bytes == FP32:
        whole = FP32 * sizes.b * sizes.h * sizes.s * sizes.d_v
        product = (whole, delta, delta, -delta, -whole)
    else:
        product = (delta,)
    return (*product, workspace, -delta, -workspace)


def _accumulators(sizes: Heads) -> int:
    """Return bytes for one head of one sequence (workspace_elements_gq, _gk, _gv), with lock and counter per tile."""
    locks = 16
    b, h, s, t, d = sizes.b, sizes.h, sizes.s, sizes.t, sizes.d
    if sizes.item_bytes == FP32:
        return ceil_div(s, 64) * (256 * round_up(d, 8) + locks)
    if d <= 64:
        return ceil_div(s, 64) * (FP32 * 64 * 64 + locks)
    if d <= 128:
        return ceil_div(s, 128) * (FP32 * 128 * 128 + locks)
    splits = max(min(ceil_div(t, 64), 200 // (b * h)), 1)  # 16-bit gradients of k and v no longer fit in registers
    keys_and_values = FP32 * splits * 64 * (round_up(d, 128) + round_up(sizes.d_v, 128))
    return keys_and_values + ceil_div(s, 128) * ceil_div(d, 64) * (FP32 * 128 * 64 + locks)
