"""Metadata tables of FSDP2's copy kernels: offsets of each parameter's part, and the copy task of each thread block.

Source: pytorch aten/src/ATen/native/cuda/TensorShape.cu, split_with_sizes_copy_out_cuda_contiguous_no_cast (parameters
out of the all-gather output) and get_chunk_cat_metadata (gradients into the reduce-scatter input). 8-byte integers, in
one allocation.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt

from memcalc.workspaces import Script, ceil_div, transient
from memcalc.workspaces.multiprocessors import Multiprocessors

ITEM = 8
THREADS = 128  # of a thread block
TILE = 16 * THREADS  # bytes that a thread block copies at once
OVERSUBSCRIBED = 2


def split_copy(parts: Sequence[int], ranks: int, gpu: Multiprocessors) -> Script:
    """Return the script of copying out gathered parameters.

    Args:
        parts: bytes of each parameter's shard on one rank.
        ranks: number of ranks gathered from.
        gpu: large copies are distributed over its multiprocessors.
    """
    blocks = sum(ceil_div(part, TILE) for part in parts)
    most = gpu.count * gpu.threads // THREADS * OVERSUBSCRIBED
    rounds = ceil_div(blocks * ranks, most)
    together = min(ceil(sqrt(rounds)), ranks)
    each = TILE * ceil_div(rounds, together)
    blocks = sum(ceil_div(part, each) for part in parts)
    # Sources, destinations, sizes; the parameter of each thread block; the first thread block of each, and the end.
    return transient(ITEM * (3 * len(parts) + blocks + len(parts) + 1))


def chunk_cat(parts: Sequence[int]) -> Script:
    """Return the script of copying in gradients; `parts` are bytes of each one's padded shard."""
    blocks = sum(ceil_div(part, TILE) for part in parts)
    # Sources, sizes, padded sizes and numbers of thread blocks; two lists of offsets, each with an end; the gradient of
    # each thread block.
    return transient(ITEM * (4 * len(parts) + 2 * (len(parts) + 1) + blocks))
