"""A long stream drawn small: the peak of each of so many stretches, so that no peak is lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from memcalc.events.event import Event, Kind
from memcalc.events.timeline import Timeline
from memcalc.ledger.component import Component

NEAR = 1.3  # a limit further above the highest value would make the picture small for nothing


class Stretch(NamedTuple):
    """Events `begin` to `end` (not included), told by their peak. Bytes."""

    begin: int
    end: int
    event: int  # the position of the peak, the first where several are as high
    total: int
    components: tuple[int, ...]  # at that moment, in the order of `Outline.components`; they sum to `total`
    reserved: int | None  # the most that was reserved in the stretch


class Span(NamedTuple):
    """Where a phase lies in the stream: from event `begin` to `end` (not included)."""

    phase: str
    begin: int
    end: int


@dataclass(frozen=True)
class Outline:
    """A stream in a few hundred stretches."""

    components: tuple[Component | None, ...]  # those that occur, in the order of `Component`; None is unattributed
    stretches: tuple[Stretch, ...]
    spans: tuple[Span, ...]
    events: tuple[Event, ...]  # one for each stretch: that of its peak
    length: int  # of the stream that is drawn
    failed: bool  # whether the run died at its end
    limit: int | None  # bytes that the device has, where that is near enough to be drawn

    @cached_property
    def peak(self) -> int:
        """The stretch that holds the peak of all, the first where several do; -1 where nothing is."""
        totals = [stretch.total for stretch in self.stretches]
        return totals.index(max(totals)) if totals else -1

    @cached_property
    def top(self) -> int:
        """The highest value that a picture must have room for."""
        return max(_highest_value(self.stretches), self.limit or 0)

    def span_of(self, event: int) -> Span | None:
        """The phase that an event belongs to; None before the first one."""
        return next((span for span in reversed(self.spans) if span.begin <= event), None)


def outline(
    timeline: Timeline,
    stretches: int,
    allocated: Sequence[int] | None = None,
    reserved: Sequence[int] | None = None,
    limit: int | None = None,
) -> Outline:
    """Cuts a stream into stretches of as many events each, and keeps the peak of each.

    Args:
        timeline: the stream.
        stretches: how many; as many as there are events where those are fewer.
        allocated: bytes that an allocator had handed out after each event (`History.allocated`). What they exceed the
            requests by becomes block rounding. A run that died has fewer of them than events; the rest is left out.
        reserved: likewise, what it held of the device.
        limit: bytes that the device has for the allocator.
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
        Stretch(begin, end, event, totals[event], parts, None if reserved is None else max(reserved[begin:end]))
        for (begin, end), event, parts in zip(cuts, highest, moments, strict=True)
    )
    return Outline(
        components=components,
        stretches=found,
        spans=tuple(spans(timeline.events, length)),
        events=tuple(timeline.events[event] for event in highest),
        length=length,
        failed=length < len(timeline.events),
        limit=near(limit, _highest_value(found)),
    )


def near(limit: int | None, highest: int) -> int | None:
    """A device's limit where it is near enough to the highest value to be drawn."""
    return limit if limit is not None and limit <= NEAR * highest else None


def _highest_value(stretches: Iterable[Stretch]) -> int:
    return max((max(stretch.total, stretch.reserved or 0) for stretch in stretches), default=0)


def _highest(totals: Sequence[int], begin: int, end: int) -> int:
    stretch = totals[begin:end]
    return begin + stretch.index(max(stretch))


def _components_at(
    timeline: Timeline, moments: list[int]
) -> tuple[tuple[Component | None, ...], list[tuple[int, ...]]]:
    """Bytes by component after each of some events, given in rising order."""
    every = (*Component, None)
    places = {id(component): place for place, component in enumerate(every)}  # their own hash is slow
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
    """The same with what the allocator added to the requests, after the other components, before the unattributed."""
    added = [size - sum(moment) for size, moment in zip(allocated, moments, strict=True)]
    if not any(added):
        return components, moments
    place = components.index(None) if None in components else len(components)
    if Component.BLOCK_ROUNDING in components:  # a recording may have named some of it
        place = components.index(Component.BLOCK_ROUNDING)
        summed = [(*m[:place], m[place] + size, *m[place + 1 :]) for m, size in zip(moments, added, strict=True)]
        return components, summed
    widened = [(*m[:place], size, *m[place:]) for m, size in zip(moments, added, strict=True)]
    return (*components[:place], Component.BLOCK_ROUNDING, *components[place:]), widened


def spans(events: Sequence[Event], length: int) -> list[Span]:
    """Where the phases lie among the first `length` events."""
    kinds = map(itemgetter(0), events[:length])
    marks = [index for index, kind in enumerate(kinds) if kind is Kind.PHASE]
    return [Span(events[begin].phase, begin, end) for begin, end in pairwise([*marks, length])]
