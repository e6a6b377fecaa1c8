"""The gradients of a stage in the order of its parameters, and the first rank's flat slice of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter, LocalParameters


class ReadyGradient(NamedTuple):
    """A produced gradient."""

    place: str  # its part of the model: "embedding", "layer" or "head"
    layer: int  # number of its layer
    number: int  # its parameter's number
    elements: int  # its number of elements
    routed: bool = False  # whether it belongs to routed experts


@lru_cache(maxsize=64)
def gradient_order(parameters: LocalParameters) -> tuple[ReadyGradient, ...]:
    """Return the gradients of a stage in the order of its parameters; backward produces them in reverse."""
    ends = {
        place: [parameter for parameter in parameters if parameter.where == place] for place in ("embedding", "head")
    }
    parts = [("embedding", 0, ends["embedding"]), *(("layer", *each) for each in enumerate(layers_of(parameters)))]
    # computed once, not for each layer
    known = {id(parameter): (parameter.trains, parameter.elements, parameter.routed) for parameter in parameters}
    found: list[ReadyGradient] = []
    number = 0
    for place, layer, tensors in (*parts, ("head", 0, ends["head"])):
        for held in tensors:
            trains, elements, routed = known[id(held)]
            if trains:
                found.append(ReadyGradient(place, layer, number, elements, routed))
            number += 1
    return tuple(found)


def layers_of(parameters: LocalParameters) -> Iterator[list[LocalParameter]]:
    """Yield each layer's parameters, dense layers first."""
    kinds: dict[str, list[LocalParameter]] = {}
    for parameter in parameters:
        if parameter.where == "layer":
            kinds.setdefault(parameter.module.partition("*")[0], []).append(parameter)
    for tensors in kinds.values():
        yield from [tensors] * max(parameter.count for parameter in tensors)


class RankSlice(NamedTuple):
    """The first rank's flat slice of all parameters."""

    touched: int  # elements of the parameters that overlap the slice
    piece: int  # elements of the largest part of one parameter in the slice


def first_rank_slice(parameters: LocalParameters, ranks: int) -> RankSlice:
    """Return the first rank's slice at stages 1 and 2."""
    share = -(-sum(parameter.count * parameter.elements for parameter in parameters if parameter.trains) // ranks)
    touched = piece = 0
    for arrival in gradient_order(parameters):
        if touched < share:
            piece = max(piece, min(arrival.elements, share - touched))
            touched += arrival.elements
    return RankSlice(touched, piece)
