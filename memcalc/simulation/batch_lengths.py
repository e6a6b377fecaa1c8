"""Batches of different lengths, as programs have them that pad each batch to its longest sequence.

PyTorch's allocator does not merge segments. Blocks that were cut for a short batch do not serve a longer one, and
optimizer states that are allocated among the free blocks of the first batch stay there. So such a run needs more memory
than its longest batches alone, and how much more depends on the order of the lengths, which a config does not have. It
is replayed in several orders.
"""

from __future__ import annotations

from memcalc.spec.spec import Spec

# Lengths of consecutive micro-batches, in eighths of the longest one. The first one decides most, because optimizer
# states are allocated after it. In four orders the longest batch is second; in the last one each batch is longer than
# the one before, so that blocks of three lengths are free when the longest comes. benchmarks/batch_lengths.py compares
# the orders with random ones.
EIGHTHS = ((1, 8, 6, 8), (3, 8, 7, 8), (5, 8, 2, 8), (7, 8, 5, 8), (3, 5, 7, 8))
_SHORTEST = 2  # tokens: the loss shifts labels by one, so a single token has none


def orders_of(spec: Spec) -> tuple[tuple[int, ...], ...]:
    """Return the orders of sequence lengths in which a run is replayed; empty if all batches have the same length."""
    training, parallelism = spec.training, spec.parallelism
    if not training.variable_lengths or spec.inference is not None or parallelism.pipeline_parallel > 1:
        return ()
    if parallelism.has_pipeline_engine:  # its buffers have one shape (DeepSpeed 0.19 runtime/pipe/engine.py)
        return ()
    # Sequences are split over the ranks of tensor and context parallelism.
    longest, multiple = training.sequence_length, parallelism.tensor_parallel * parallelism.context_parallel
    least = min(max(_SHORTEST, multiple), longest)
    return tuple(
        tuple(max(longest * each // 8 // multiple * multiple, least) for each in eighths) for eighths in EIGHTHS
    )


def with_length(spec: Spec, length: int) -> Spec:
    """Return a run with another sequence length."""
    if length == spec.training.sequence_length:
        return spec
    return spec.with_training(sequence_length=length)
