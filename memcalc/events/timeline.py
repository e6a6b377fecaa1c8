"""The timeline of a stream: which allocations are live after each event, and their sums.

Bytes are requested bytes; `memcalc.allocator.event_replay` computes allocated and reserved bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.events.event import Event, EventType
from memcalc.ledger.component import Component


@dataclass(frozen=True)
class Timeline:
    """A stream of events with its sums.

    `deltas[i]` is the change of live bytes by event i, `changed[i]` the allocation that event i made or freed.
    """

    events: Sequence[Event]
    deltas: tuple[int, ...]
    changed: tuple[Event | None, ...]

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Live bytes after each event."""
        return tuple(accumulate(self.deltas))

    @cached_property
    def peak_bytes(self) -> int:
        """Peak live bytes; 0 for an empty stream."""
        return max(self.totals, default=0)

    def live_after(self, index: int) -> list[Event]:
        """Return the allocations that are live after event `index`, in allocation order."""
        living: dict[int, Event] = {}
        for event in self.events[: index + 1]:
            if event.kind is EventType.ALLOC:
                living[event.storage] = event
            elif event.kind is EventType.FREE:
                del living[event.storage]
        return list(living.values())

    def by_component(self, index: int) -> dict[Component | None, int]:
        """Return bytes by component after event `index`, ordered as `Component`, unattributed last, without zeros."""
        sums: dict[Component | None, int] = {}
        for event in self.live_after(index):
            sums[event.component] = sums.get(event.component, 0) + event.bytes
        return {component: sums[component] for component in (*Component, None) if sums.get(component)}


def timeline(events: Iterable[Event]) -> Timeline:
    """Return the timeline of a stream.

    Raises:
        InputError: a storage is allocated twice, or freed while it is not live.
    """
    events = tuple(events)
    living: dict[int, Event] = {}
    deltas: list[int] = []
    changed: list[Event | None] = []
    for index, event in enumerate(events):
        delta, subject = 0, None
        if event.kind is EventType.ALLOC:
            if event.storage in living:
                raise out_of_order(index, event, "allocates", "already allocated")
            living[event.storage] = subject = event
            delta = event.bytes
        elif event.kind is EventType.FREE:
            subject = living.pop(event.storage, None)
            if subject is None:
                raise out_of_order(index, event, "frees", "not allocated")
            delta = -subject.bytes
        deltas.append(delta)
        changed.append(subject)
    return Timeline(events, tuple(deltas), tuple(changed))


def out_of_order(index: int, event: Event, verb: str, state: str) -> InputError:
    """Return the error for an event that cannot follow the events before it."""
    return InputError(
        f"event {index} {verb} storage {event.storage}, which is {state}.",
        "A stream has the alloc and the free of each storage. Record it from the beginning of the run.",
    )


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
