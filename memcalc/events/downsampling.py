"""Downsampling of a long stream: the peak of each of a few hundred intervals, so that no peak is lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from memcalc.events.event import Event, EventType
from memcalc.events.timeline import Timeline
from memcalc.ledger.component import Component

NEAR = 1.3  # a limit higher than this times the highest value would leave most of the plot empty


class EventInterval(NamedTuple):
    """Events `begin` to `end` (exclusive), represented by their peak. Bytes."""

    begin: int
    end: int
    event: int  # the position of the peak, the first one if several are equal
    total: int
    components: tuple[int, ...]  # at the peak, in the order of `DownsampledTimeline.components`; they sum to `total`
    reserved: int | None  # peak reserved bytes in the interval


class PhaseInterval(NamedTuple):
    """The event interval of a phase: from event `begin` to `end` (exclusive)."""

    phase: str
    begin: int
    end: int


@dataclass(frozen=True)
class DownsampledTimeline:
    """A stream downsampled to a few hundred intervals."""

    components: tuple[Component | None, ...]  # those that occur, in the order of `Component`; None is unattributed
    stretches: tuple[EventInterval, ...]
    spans: tuple[PhaseInterval, ...]
    events: tuple[Event, ...]  # one per interval: the event at its peak
    length: int  # number of events of the whole stream
    failed: bool  # whether the run ran out of memory at its end
    limit: int | None  # device memory in bytes, if close enough to the curve to be drawn

    @cached_property
    def peak(self) -> int:
        """The index of the interval with the overall peak, the first one if several are equal; -1 without intervals."""
        totals = [interval.total for interval in self.stretches]
        return totals.index(max(totals)) if totals else -1

    @cached_property
    def top(self) -> int:
        """The maximum of a plot's y axis in bytes."""
        return max(_highest_value(self.stretches), self.limit or 0)


def downsample(
    timeline: Timeline,
    stretches: int,
    allocated: Sequence[int] | None = None,
    reserved: Sequence[int] | None = None,
    limit: int | None = None,
) -> DownsampledTimeline:
    """Split a stream into intervals of equally many events, and keep the peak of each.

    Args:
        timeline: the stream.
        stretches: number of intervals; the number of events if that is smaller.
        allocated: allocated bytes after each event (`History.allocated`). Their excess over requested bytes becomes
            block rounding. A run that ran out of memory has fewer entries than events; the other events are omitted.
        reserved: reserved bytes after each event, with the same length.
        limit: bytes of device memory that the allocator may use.
    """
    totals = timeline.totals if allocated is None else allocated
    length = len(totals)
    count = min(stretches, length)
    bounds = [length * i // count for i in range(count + 1)] if count else [0]
    cuts = list(pairwise(bounds))
    highest = [_highest(totals, begin, end) for begin, end in cuts]
    components, moments = _components_at(timeline, highest)
    if allocated is not None:
        components, moments = _with_rounding(components, moments, [allocated[event] for event in highest])
    found = tuple(
        EventInterval(begin, end, event, totals[event], parts, None if reserved is None else max(reserved[begin:end]))
        for (begin, end), event, parts in zip(cuts, highest, moments, strict=True)
    )
    return DownsampledTimeline(
        components=components,
        stretches=found,
        spans=tuple(spans(timeline.events, length)),
        events=tuple(timeline.events[event] for event in highest),
        length=length,
        failed=length < len(timeline.events),
        limit=near_events(limit, _highest_value(found)),
    )


def near_events(limit: int | None, highest: int) -> int | None:
    """Return the device's limit if it is close enough to the highest value to be drawn; otherwise None."""
    return limit if limit is not None and limit <= NEAR * highest else None


def _highest_value(stretches: Iterable[EventInterval]) -> int:
    return max((max(interval.total, interval.reserved or 0) for interval in stretches), default=0)


def _highest(totals: Sequence[int], begin: int, end: int) -> int:
    stretch = totals[begin:end]
    return begin + stretch.index(max(stretch))


def _components_at(
    timeline: Timeline, moments: list[int]
) -> tuple[tuple[Component | None, ...], list[tuple[int, ...]]]:
    """Return bytes by component after each of some events, given in ascending order."""
    every = (*Component, None)
    places = {id(component): place for place, component in enumerate(every)}  # by id: hashing an Enum is slow
    sums = [0] * len(every)
    found = []
    wanted = iter(moments)
    following = next(wanted, -1)
    for index, (delta, event) in enumerate(zip(timeline.deltas, timeline.changed, strict=True)):
        if event is not None:
            sums[places[id(event.component)]] += delta
        if index == following:
            found.append(tuple(sums))
            following = next(wanted, -1)
    used = [place for place in range(len(every)) if any(moment[place] for moment in found)]
    return tuple(every[place] for place in used), [tuple(moment[place] for place in used) for moment in found]


def _with_rounding(
    components: tuple[Component | None, ...], moments: list[tuple[int, ...]], allocated: list[int]
) -> tuple[tuple[Component | None, ...], list[tuple[int, ...]]]:
    """Add block rounding (allocated minus requested bytes), after the other components and before the unattributed."""
    added = [size - sum(moment) for size, moment in zip(allocated, moments, strict=True)]
    if not any(added):
        return components, moments
    place = components.index(None) if None in components else len(components)
    if Component.BLOCK_ROUNDING in components:  # a recording may attribute some of it already
        place = components.index(Component.BLOCK_ROUNDING)
        summed = [(*m[:place], m[place] + size, *m[place + 1 :]) for m, size in zip(moments, added, strict=True)]
        return components, summed
    widened = [(*m[:place], size, *m[place:]) for m, size in zip(moments, added, strict=True)]
    return (*components[:place], Component.BLOCK_ROUNDING, *components[place:]), widened


def spans(events: Sequence[Event], length: int) -> list[PhaseInterval]:
    """Return the event interval of each phase among the first `length` events."""
    kinds, mark = map(itemgetter(0), events[:length]), EventType.PHASE
    marks = [index for index, kind in enumerate(kinds) if kind is mark]
    return [PhaseInterval(events[begin].phase, begin, end) for begin, end in pairwise([*marks, length])]
