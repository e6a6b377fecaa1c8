"""Batches of different lengths, as programs have them that pad each batch to its longest sequence.

PyTorch's allocator does not merge segments. Blocks that were cut for a short batch do not serve a longer one, and
optimizer states that are allocated among the free blocks of the first batch stay there. So such a run needs more memory
than its longest batches alone, and how much more depends on the order of the lengths, which a config does not have. It
is replayed in several orders.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.spec.spec import Spec


class BatchLength(NamedTuple):
    """The length of a micro-batch.

    Args:
        tokens: of each sequence, including padding.
        labeled: `training.labeled_tokens`.
    """

    tokens: int
    labeled: int | None = None


# Lengths of consecutive micro-batches, in eighths of the longest one. The first one decides most, because optimizer
# states are allocated after it. In four orders the longest batch is second; in the last one each batch is longer than
# the one before, so that blocks of three lengths are free when the longest comes. benchmarks/batch_lengths.py compares
# the orders with random ones.
EIGHTHS = ((1, 8, 6, 8), (3, 8, 7, 8), (5, 8, 2, 8), (7, 8, 5, 8), (3, 5, 7, 8))
_SHORTEST = 2  # tokens: the loss shifts labels by one, so a single token has none


def orders_of(spec: Spec) -> tuple[tuple[BatchLength, ...], ...]:
    """Return the orders of lengths in which a run is replayed; empty if all batches have the same length.

    Padded batches of one length also differ in how many of their tokens have a label, and so in their tile of logits.
    """
    training, parallelism = spec.training, spec.parallelism
    if not training.variable_lengths or spec.inference is not None or parallelism.pipeline_parallel > 1:
        return ()
    if parallelism.has_pipeline_engine:  # its buffers have one shape (DeepSpeed 0.19 runtime/pipe/engine.py)
        return ()
    # Sequences are split over the ranks of tensor and context parallelism.
    longest, multiple = training.sequence_length, parallelism.tensor_parallel * parallelism.context_parallel
    least = min(max(_SHORTEST, multiple), longest)
    labels = training.labeled_tokens

    def shortened(eighths: int) -> BatchLength:
        tokens = max(longest * eighths // 8 // multiple * multiple, least)
        return BatchLength(tokens, None if labels is None else min(max(labels * eighths // 8, 1), tokens - 1))

    orders = [tuple(map(shortened, eighths)) for eighths in EIGHTHS]
    pads = (training.micro_batch_size > 1 or training.pairs) and not training.padding_free
    if training.loss == "tiled" and pads and training.completion_length is None:  # GRPO's completions all have labels
        most = labels or longest - 1
        orders.append(tuple(BatchLength(longest, max(most * each // 8, 1)) for each in EIGHTHS[-1]))
    return tuple(orders)


def length_of(spec: Spec) -> BatchLength:
    """Return the length of a run's longest batches."""
    return BatchLength(spec.training.sequence_length, spec.training.labeled_tokens)


def with_length(spec: Spec, length: BatchLength) -> Spec:
    """Return a run with batches of another length."""
    if length == length_of(spec):
        return spec
    return spec.with_training(sequence_length=length.tokens, labeled_tokens=length.labeled)
