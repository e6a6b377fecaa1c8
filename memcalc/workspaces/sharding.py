"""Tables that FSDP2's copy kernels are told by: where each parameter's part begins, which block of threads copies what.

Source: pytorch aten/src/ATen/native/cuda/TensorShape.cu, split_with_sizes_copy_out_cuda_contiguous_no_cast (parameters
out of what was gathered) and get_chunk_cat_metadata (gradients into what is reduced). Numbers of 8 bytes, in one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt

from memcalc.workspaces import Script, ceil_div, transient
from memcalc.workspaces.multiprocessors import Multiprocessors

ITEM = 8
THREADS = 128  # of a block
TILE = 16 * THREADS  # bytes that a block copies at once
OVERSUBSCRIBED = 2


def split_copy(parts: Sequence[int], ranks: int, card: Multiprocessors) -> Script:
    """Gathered parameters.

    Args:
        parts: bytes of each parameter's part on one rank.
        ranks: whose parts were gathered.
        card: large copies are shared out over its multiprocessors.
    """
    blocks = sum(ceil_div(part, TILE) for part in parts)
    most = card.count * card.threads // THREADS * OVERSUBSCRIBED
    rounds = ceil_div(blocks * ranks, most)
    together = min(ceil(sqrt(rounds)), ranks)
    each = TILE * ceil_div(rounds, together)
    blocks = sum(ceil_div(part, each) for part in parts)
    # From where, to where, how much; whose each block is; where the blocks of each begin and the last end.
    return transient(ITEM * (3 * len(parts) + blocks + len(parts) + 1))


def chunk_cat(parts: Sequence[int]) -> Script:
    """Gradients: `parts` are bytes of each one's padded part, as it is sent."""
    blocks = sum(ceil_div(part, TILE) for part in parts)
    # Sources, sizes, padded sizes and numbers of blocks; two lists of beginnings, each with an end; whose a block is.
    return transient(ITEM * (4 * len(parts) + 2 * (len(parts) + 1) + blocks))
