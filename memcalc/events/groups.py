"""Groups of identical allocations: the same tensor of every layer becomes one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from memcalc.events.event import Event
from memcalc.ledger.component import Component

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a path component that is all digits


class AllocationGroup(NamedTuple):
    """Identical allocations: of one size, by one operator and source line.

    Their modules differ only in the numbers of their paths.
    """

    component: Component | None
    module: str  # "layers.*.mlp" for several modules
    operator: str
    shape: tuple[int, ...]
    dtype: str
    line: str
    count: int  # type: ignore[assignment] # hides tuple.count, which no group needs
    bytes: int  # of all allocations together


def module_pattern(module: str) -> str:
    """Return a module's path with "*" for each number: "layers.3.mlp.experts.7" becomes "layers.*.mlp.experts.*"."""
    return _NUMBER.sub("*", module)


def groups(events: Iterable[Event]) -> list[AllocationGroup]:
    """Return the allocations in groups, the largest group first; equal groups in the order of the events."""
    found: dict[tuple[object, ...], list[Event]] = {}
    for event in events:
        place = (module_pattern(event.module), event.operator, event.line)
        found.setdefault((event.component, event.shape, event.dtype, event.bytes, *place), []).append(event)
    return sorted((_group(alike) for alike in found.values()), key=lambda group: -group.bytes)


def _group(alike: list[Event]) -> AllocationGroup:
    first = alike[0]
    one_module = all(event.module == first.module for event in alike)
    return AllocationGroup(
        first.component,
        first.module if one_module else module_pattern(first.module),
        first.operator,
        first.shape,
        first.dtype,
        first.line,
        len(alike),
        sum(event.bytes for event in alike),
    )
