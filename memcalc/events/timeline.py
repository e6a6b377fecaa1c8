"""What was alive when: a stream of events, added up over time.

Bytes are those asked for; what an allocator adds is told by `memcalc.allocator.playing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.events.event import Event, Kind
from memcalc.ledger.component import Component


class PhasePeak(NamedTuple):
    """The peak of one phase."""

    phase: str
    event: int  # its position in the stream
    bytes: int


@dataclass(frozen=True)
class Timeline:
    """A stream of events with its sums.

    `deltas[i]` is by how many bytes event i changed what is alive, `changed[i]` the allocation that it made or ended.
    """

    events: Sequence[Event]
    deltas: tuple[int, ...]
    changed: tuple[Event | None, ...]

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Bytes alive after each event."""
        return tuple(accumulate(self.deltas))

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes alive at any moment; 0 for an empty stream."""
        return max(self.totals, default=0)

    @cached_property
    def peak_index(self) -> int:
        """The event after which the most bytes are alive, the first of them where several do.

        Raises:
            ValueError: for an empty stream, which has no events.
        """
        return self.totals.index(self.peak_bytes)

    def alive(self, index: int) -> list[Event]:
        """The allocations alive after event `index`, in the order in which they were made."""
        living: dict[int, Event] = {}
        for event in self.events[: index + 1]:
            if event.kind is Kind.ALLOC:
                living[event.storage] = event
            elif event.kind is Kind.FREE:
                del living[event.storage]
        return list(living.values())

    def by_component(self, index: int) -> dict[Component | None, int]:
        """Bytes by component after event `index`, in the order of `Component`, unattributed last; zeros left out."""
        sums: dict[Component | None, int] = {}
        for event in self.alive(index):
            sums[event.component] = sums.get(event.component, 0) + event.bytes
        return {component: sums[component] for component in (*Component, None) if sums.get(component)}

    def series(self) -> dict[Component | None, tuple[int, ...]]:
        """Bytes alive after each event for each component that occurs, to stack in a plot; None is unattributed."""
        found = {event.component for event in self.changed if event is not None}
        return {
            component: tuple(
                accumulate(
                    delta if event is not None and event.component is component else 0
                    for delta, event in zip(self.deltas, self.changed, strict=True)
                )
            )
            for component in (*Component, None)
            if component in found
        }

    def phase_peaks(self) -> list[PhasePeak]:
        """The peak of each phase, from its mark (whose total is that of the moment before) to the next mark.

        What comes before the first mark belongs to no phase.
        """
        peaks: list[PhasePeak] = []
        for index, (event, total) in enumerate(zip(self.events, self.totals, strict=True)):
            if event.kind is Kind.PHASE:
                peaks.append(PhasePeak(event.phase, index, total))
            elif peaks and total > peaks[-1].bytes:
                peaks[-1] = PhasePeak(peaks[-1].phase, index, total)
        return peaks


def timeline(events: Iterable[Event]) -> Timeline:
    """Adds a stream up.

    Raises:
        InputError: when a storage is allocated twice, or freed while it is not alive.
    """
    events = tuple(events)
    living: dict[int, Event] = {}
    deltas: list[int] = []
    changed: list[Event | None] = []
    for index, event in enumerate(events):
        delta, subject = 0, None
        if event.kind is Kind.ALLOC:
            if event.storage in living:
                raise out_of_order(index, event, "allocates", "already alive")
            living[event.storage] = subject = event
            delta = event.bytes
        elif event.kind is Kind.FREE:
            subject = living.pop(event.storage, None)
            if subject is None:
                raise out_of_order(index, event, "frees", "not alive")
            delta = -subject.bytes
        deltas.append(delta)
        changed.append(subject)
    return Timeline(events, tuple(deltas), tuple(changed))


def out_of_order(index: int, event: Event, verb: str, state: str) -> InputError:
    """The error for an event that cannot follow those before it."""
    return InputError(
        f"event {index} {verb} storage {event.storage}, which is {state}.",
        "A stream tells each storage's life from its alloc to its free; record it from the beginning.",
    )
