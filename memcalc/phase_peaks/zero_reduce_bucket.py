"""DeepSpeed's gradient reductions and their buffers: the reduce bucket, simulated gradient by gradient.

DeepSpeed 0.19 runtime/zero/stage3.py and stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads: a gradient
is copied into the bucket, and its own memory is freed. Before a gradient that would overflow the bucket, the bucket's
contents are reduced, which flattens them into another buffer. A gradient larger than the bucket stays in place until
it is reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from memcalc.layout.gradient_order import ReadyGradient, gradient_order
from memcalc.layout.local_parameters import LocalParameters


class BucketReduction(NamedTuple):
    """Gradients that are reduced together.

    Args:
        place: the part of the model with the gradient produced just before, which waits; "end": none.
        layer: its layer.
        number: its parameter's number.
        copied: elements that are flattened into a separate buffer.
        beside: elements of the reduced gradient, if it was too large for the bucket.
        moved: elements that have passed through the bucket so far, including these.
    """

    place: str
    layer: int
    number: int
    copied: int
    beside: int
    moved: int


@lru_cache(maxsize=1024)
def in_backward(parameters: LocalParameters, ranks: int, bucket: int) -> tuple[BucketReduction, ...]:
    """Return the reductions of a backward.

    Args:
        parameters: parameters of the stage.
        ranks: number of ranks at stage 3, which shards a single divisible gradient without a copy; 0: stage 2.
        bucket: elements of the gradient bucket.
    """
    return tuple(_reductions(reversed(gradient_order(parameters)), ranks, bucket))


@lru_cache(maxsize=1024)
def after_backward(parameters: LocalParameters, bucket: int) -> tuple[BucketReduction, ...]:
    """Return the reductions of stage 1, which reduces all parameters after backward."""
    return tuple(_reductions(gradient_order(parameters), 0, bucket))


def first_layer(parameters: LocalParameters, bucket: int) -> int | None:
    """Return the first layer in backward at which the bucket fills; None if it fills in no layer."""
    return next((each.layer for each in in_backward(parameters, 0, bucket) if each.place == "layer"), None)


def _reductions(gradients: Iterable[ReadyGradient], ranks: int, bucket: int) -> Iterator[BucketReduction]:
    tensors = inside = moved = 0

    def reduced(place: str, layer: int, number: int) -> BucketReduction:
        alone = tensors == 1 and ranks > 0 and inside % ranks == 0
        return BucketReduction(place, layer, number, 0 if alone else inside, inside if inside > bucket else 0, moved)

    for place, layer, number, elements, _ in gradients:
        if inside and inside + elements > bucket:
            yield reduced(place, layer, number)
            tensors = inside = 0
        tensors, inside = tensors + 1, inside + elements
        moved += elements if elements <= bucket else 0
    if inside:
        yield reduced("end", 0, 0)
