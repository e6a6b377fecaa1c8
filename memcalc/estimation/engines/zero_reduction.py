"""When DeepSpeed reduces gradients, and what it needs for that: its bucket, played gradient by gradient.

DeepSpeed 0.19 runtime/zero/stage3.py and stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads: a gradient
is copied into the bucket, and its own memory goes. One that would overflow the bucket has what is there reduced first,
which flattens it into one more buffer. One that is larger than the bucket stays where it is until it is reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from memcalc.estimation.sharding import Held, Parameters

# runtime/zero/config.py, reduce_bucket_size: elements of the buffer that gradients are gathered in.
BUCKET = 500_000_000


class Arrival(NamedTuple):
    """A gradient: of which part and layer of the model, its parameter's number and elements, whether an expert's."""

    place: str
    layer: int
    number: int
    elements: int
    routed: bool = False


class Reduction(NamedTuple):
    """What is reduced at once.

    Args:
        place: the part whose gradient has just arrived, and waits; "end": none.
        layer: its layer.
        number: its parameter's number.
        copied: elements that are flattened into a buffer of their own.
        beside: elements of the gradient that was too large for the bucket, if that is what is reduced.
        moved: elements that have gone through the bucket so far, these included.
    """

    place: str
    layer: int
    number: int
    copied: int
    beside: int
    moved: int


@lru_cache(maxsize=64)
def arrivals(parameters: Parameters) -> tuple[Arrival, ...]:
    """The gradients of a stage in the order of its parameters, which backward turns round."""
    ends = {place: [held for held in parameters if held.where == place] for place in ("embedding", "head")}
    parts = [("embedding", 0, ends["embedding"]), *(("layer", *each) for each in enumerate(layers_of(parameters)))]
    known = {id(held): (held.trains, held.elements, held.routed) for held in parameters}  # once, not for each layer
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
    """Each layer's parameters, dense layers first."""
    kinds: dict[str, list[Held]] = {}
    for held in parameters:
        if held.where == "layer":
            kinds.setdefault(held.module.partition("*")[0], []).append(held)
    for tensors in kinds.values():
        yield from [tensors] * max(held.count for held in tensors)


@lru_cache(maxsize=1024)
def in_backward(parameters: Parameters, ranks: int) -> tuple[Reduction, ...]:
    """The reductions of a backward; `ranks`: over how many stage 3 cuts one gradient without a copy, 0 for stage 2."""
    return tuple(_reductions(reversed(arrivals(parameters)), ranks))


@lru_cache(maxsize=1024)
def after_backward(parameters: Parameters) -> tuple[Reduction, ...]:
    """The reductions of stage 1, which goes through all parameters when backward has ended."""
    return tuple(_reductions(arrivals(parameters), 0))


def first_layer(parameters: Parameters) -> int | None:
    """The layer in whose backward the bucket is full for the first time; None if it never is in a layer."""
    return next((each.layer for each in in_backward(parameters, 0) if each.place == "layer"), None)


class Share(NamedTuple):
    """The first rank's flat stretch of all parameters: elements of those that it touches, and its largest piece."""

    touched: int
    piece: int


def first_share(parameters: Parameters, ranks: int) -> Share:
    """What the first rank has at stages 1 and 2."""
    share = -(-sum(held.count * held.elements for held in parameters if held.trains) // ranks)
    touched = piece = 0
    for arrival in arrivals(parameters):
        if touched < share:
            piece = max(piece, min(arrival.elements, share - touched))
            touched += arrival.elements
    return Share(touched, piece)


def _reductions(gradients: Iterable[Arrival], ranks: int) -> Iterator[Reduction]:
    tensors = inside = moved = 0

    def reduced(place: str, layer: int, number: int) -> Reduction:
        alone = tensors == 1 and ranks > 0 and inside % ranks == 0
        return Reduction(place, layer, number, 0 if alone else inside, inside if inside > BUCKET else 0, moved)

    for place, layer, number, elements, _ in gradients:
        if inside and inside + elements > BUCKET:
            yield reduced(place, layer, number)
            tensors = inside = 0
        tensors, inside = tensors + 1, inside + elements
        moved += elements if elements <= BUCKET else 0
    if inside:
        yield reduced("end", 0, 0)
