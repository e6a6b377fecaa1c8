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

from memcalc.estimation.sharding import Held, Parameters


class Arrival(NamedTuple):
    """A produced gradient.

    Args:
        place: its part of the model: "embedding", "layer" or "head".
        layer: number of its layer.
        number: its parameter's number.
        elements: its number of elements.
        routed: whether it belongs to routed experts.
    """

    place: str
    layer: int
    number: int
    elements: int
    routed: bool = False


class Reduction(NamedTuple):
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


@lru_cache(maxsize=64)
def arrivals(parameters: Parameters) -> tuple[Arrival, ...]:
    """Return the gradients of a stage in the order of its parameters; backward produces them in reverse."""
    ends = {place: [held for held in parameters if held.where == place] for place in ("embedding", "head")}
    parts = [("embedding", 0, ends["embedding"]), *(("layer", *each) for each in enumerate(layers_of(parameters)))]
    # computed once, not for each layer
    known = {id(held): (held.trains, held.elements, held.routed) for held in parameters}
    found: list[Arrival] = []
    number = 0
    for place, layer, tensors in (*parts, ("head", 0, ends["head"])):
        for held in tensors:
            trains, elements, routed = known[id(held)]
            if trains:
                found.append(Arrival(place, layer, number, elements, routed))
            number += 1
    return tuple(found)


def layers_of(parameters: Parameters) -> Iterator[list[Held]]:
    """Yield each layer's parameters, dense layers first."""
    kinds: dict[str, list[Held]] = {}
    for held in parameters:
        if held.where == "layer":
            kinds.setdefault(held.module.partition("*")[0], []).append(held)
    for tensors in kinds.values():
        yield from [tensors] * max(held.count for held in tensors)


@lru_cache(maxsize=1024)
def in_backward(parameters: Parameters, ranks: int, bucket: int) -> tuple[Reduction, ...]:
    """Return the reductions of a backward.

    Args:
        parameters: parameters of the stage.
        ranks: number of ranks at stage 3, which shards a single divisible gradient without a copy; 0: stage 2.
        bucket: elements of the gradient bucket.
    """
    return tuple(_reductions(reversed(arrivals(parameters)), ranks, bucket))


@lru_cache(maxsize=1024)
def after_backward(parameters: Parameters, bucket: int) -> tuple[Reduction, ...]:
    """Return the reductions of stage 1, which reduces all parameters after backward."""
    return tuple(_reductions(arrivals(parameters), 0, bucket))


def first_layer(parameters: Parameters, bucket: int) -> int | None:
    """Return the first layer in backward at which the bucket fills; None if it fills in no layer."""
    return next((each.layer for each in in_backward(parameters, 0, bucket) if each.place == "layer"), None)


class Share(NamedTuple):
    """The first rank's flat slice of all parameters.

    Args:
        touched: elements of the parameters that overlap the slice.
        piece: elements of the largest part of one parameter in the slice.
    """

    touched: int
    piece: int


def first_share(parameters: Parameters, ranks: int) -> Share:
    """Return the first rank's slice at stages 1 and 2."""
    share = -(-sum(held.count * held.elements for held in parameters if held.trains) // ranks)
    touched = piece = 0
    for arrival in arrivals(parameters):
        if touched < share:
            piece = max(piece, min(arrival.elements, share - touched))
            touched += arrival.elements
    return Share(touched, piece)


def _reductions(gradients: Iterable[Arrival], ranks: int, bucket: int) -> Iterator[Reduction]:
    tensors = inside = moved = 0

    def reduced(place: str, layer: int, number: int) -> Reduction:
        alone = tensors == 1 and ranks > 0 and inside % ranks == 0
        return Reduction(place, layer, number, 0 if alone else inside, inside if inside > bucket else 0, moved)

    for place, layer, number, elements, _ in gradients:
        if inside and inside + elements > bucket:
            yield reduced(place, layer, number)
            tensors = inside = 0
        tensors, inside = tensors + 1, inside + elements
        moved += elements if elements <= bucket else 0
    if inside:
        yield reduced("end", 0, 0)
