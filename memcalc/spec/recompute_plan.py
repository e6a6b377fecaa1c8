"""Recomputation plans in a configuration: `training.recompute` as a list.

A number is a layer that is recomputed separately. A nested list, or a range such as "4-7", is one checkpoint segment:
forward saves the input of its first layer only. In a segment, a number is a layer that saves its activations when the
segment is recomputed. A list is a nested segment, which does not save them even then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Union

from pydantic import BeforeValidator, WithJsonSchema

Segment = tuple[Union[int, "Segment"], ...]

_RANGE = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")
DEEPEST = 16  # levels of nested lists


def _read(given: Any) -> Any:
    return tuple(_unwrapped(_item(item, 1)) for item in given) if isinstance(given, list | tuple) else given


def _item(item: Any, depth: int) -> int | Segment:
    if isinstance(item, bool) or depth > DEEPEST:
        raise ValueError
    if isinstance(item, int) and item >= 0:
        return item
    if isinstance(item, str) and (match := _RANGE.fullmatch(item)) and int(match[1]) <= int(match[2]):
        return tuple(range(int(match[1]), int(match[2]) + 1))
    if isinstance(item, list | tuple) and item:
        return tuple(_item(inner, depth + 1) for inner in item)
    raise ValueError


def _unwrapped(item: int | Segment) -> int | Segment:
    return item[0] if isinstance(item, tuple) and len(item) == 1 and isinstance(item[0], int) else item


RecomputeLayers = Annotated[
    tuple[Any, ...],
    BeforeValidator(_read),
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "integer", "minimum": 0},
                    {"type": "string", "pattern": "^[0-9]+-[0-9]+$"},
                    {"type": "array"},
                ]
            },
        }
    ),
]


def leaves(item: int | Segment) -> Iterator[int]:
    """Yield the layers (or blocks) of an item, in order."""
    if isinstance(item, int):
        yield item
    else:
        for inner in item:
            yield from leaves(inner)


def has_segments(recompute: str | Segment) -> bool:
    """Return whether some layers share a checkpoint segment, or segments are nested."""
    return not isinstance(recompute, str) and any(isinstance(item, tuple) for item in recompute)


def in_order(recompute: Segment) -> bool:
    """Return whether the layers of each list are consecutive, and no layer is named twice."""
    named = list(leaves(recompute))
    neighbors = all(b == a + 1 for item in recompute for a, b in pairwise(leaves(item)))
    return neighbors and len(set(named)) == len(named)


def items_of(recompute: Segment, layers: int) -> Segment:
    """Return the plan with every layer: a number saves its activations, a tuple is recomputed."""
    starts = {next(leaves(item)): (item,) if isinstance(item, int) else item for item in recompute}
    items: list[int | Segment] = []
    layer = 0
    while layer < layers:
        item = starts.get(layer, layer)
        items.append(item)
        layer = [*leaves(item)][-1] + 1
    return tuple(items)


def as_recompute(items: Segment, first: int, stop: int) -> list[Any] | str:
    """Return the plan in the syntax of `training.recompute`; layer 0 is block `first`, and layers end before `stop`."""
    inside = [item for item in items if first <= next(leaves(item)) < stop]
    found = [_said(item, first) for item in inside if not isinstance(item, int)]
    if not found:
        return "none"
    return "full" if found == list(range(stop - first)) else found


def _said(item: int | Segment, first: int) -> Any:
    if isinstance(item, int):
        return item - first
    layers = [inner - first for inner in item if isinstance(inner, int)]
    if len(layers) == len(item):
        low, high = layers[0], layers[-1]
        return low if low == high else f"{low}-{high}"
    return [_inner_said(inner, first) for inner in item]


def _inner_said(item: int | Segment, first: int) -> Any:
    if isinstance(item, int):
        return item - first
    return [_inner_said(inner, first) for inner in item]


def words(recompute: str | Segment) -> str:
    """Return a description: "every-2", "12 layers" or "32 layers in 8 segments"."""
    if isinstance(recompute, str):
        return recompute
    named = len(set(leaves(recompute)))
    layers = f"{named} layer{'' if named == 1 else 's'}"
    return (
        f"{layers} in {len(recompute)} segment{'' if len(recompute) == 1 else 's'}"
        if has_segments(recompute)
        else layers
    )
