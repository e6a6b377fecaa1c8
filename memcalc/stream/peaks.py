"""Peaks of allocated memory in closed form: sums over a stream of requests, without an allocator.

All rounds of a loop allocate and free the same bytes, so live memory changes by the same amount in each round, and its
maximum is in the first or the last round. Therefore a loop is summed once, for any number of rounds.

The requests have the order of allocations, but no sizes, so one stream serves many runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import neg
from types import MappingProxyType
from typing import NamedTuple

from memcalc.allocator.pytorch.constants import SIZE_MASK
from memcalc.stream.requests import Label, NamedRounds, Requests, TensorLabel

NO_ROUNDS: Mapping[Hashable, int] = MappingProxyType({})


class StorageKind(NamedTuple):
    """Storages of one label and one size."""

    label: Label  # their label
    requested: int  # the recorded bytes
    once: bool  # whether they are allocated in the first step only


class StreamSegment(NamedTuple):
    """Requests of an interval between loop boundaries: positions, and the number of rounds or its name."""

    begin: int
    end: int
    rounds: Hashable


class IntervalPeak(NamedTuple):
    """The peak of an interval."""

    bytes: int  # live bytes, rounded to the allocator's blocks
    stretch: int  # index of the interval
    position: int  # number of the interval's requests up to the peak
    last: bool  # whether a loop around the position is in its last round; otherwise in its first
    begin: int = 0  # live bytes when the interval begins


class SizelessStream:
    """A recorded stream with storage kinds instead of sizes.

    Attributes:
        phases: the phase of each interval.
        scripts: the requests of each interval: the kind of an allocated storage, or ~kind of a freed one.
        kinds: the distinct kinds of storages, which `scripts` numbers.
    """

    def __init__(self, requests: Requests) -> None:
        self._loops = requests.loops
        self.phases = [interval.phase for interval in requests.stretches]
        self.scripts: list[list[int]] = []
        kinds: list[StorageKind] = []
        known: dict[tuple[int, int, bool], int] = {}  # storages of one label object, size and life -> their kind
        labels, once = requests.labels, requests.once
        sizes = (change for interval in requests.stretches for change in interval.script if change >= 0)
        kind_of: list[int] = []  # of each storage
        for number, (label, change) in enumerate(zip(labels, sizes, strict=True)):
            key = id(label), change, number in once
            kind = known.get(key)
            if kind is None:
                kind = known[key] = len(kinds)
                kinds.append(StorageKind(label, change & SIZE_MASK, number in once))
            kind_of.append(kind)
        made = iter(kind_of)
        for interval in requests.stretches:
            self.scripts.append([next(made) if change >= 0 else ~kind_of[~change] for change in interval.script])
        self.kinds = tuple(kinds)

    @property
    def made(self) -> list[StorageKind]:
        """The kind of each allocated storage, in order."""
        return [self.kinds[kind] for script in self.scripts for kind in script if kind >= 0]

    @cached_property
    def tensors(self) -> list[tuple[int, int, int]]:
        """The kinds of block tensors: number of the kind, block, and number of the storage in the block."""
        labels = ((number, kind.label) for number, kind in enumerate(self.kinds))
        return [(number, label.block, label.storage) for number, label in labels if isinstance(label, TensorLabel)]

    @cached_property
    def others(self) -> list[int]:
        """The numbers of all other kinds."""
        return [number for number, kind in enumerate(self.kinds) if not isinstance(kind.label, TensorLabel)]

    @cached_property
    def first_once(self) -> int:
        """The index of the first interval that allocates a storage of the first step only; else their number."""
        once = {number for number, kind in enumerate(self.kinds) if kind.once}
        found = (number for number, script in enumerate(self.scripts) if not once.isdisjoint(script))
        return next(found, len(self.scripts))

    @cached_property
    def split(self) -> list[list[StreamSegment]]:
        """The segments of each interval."""
        return [[*self._segments(stretch)] for stretch in range(len(self.scripts))]

    def segments(self, stretch: int, rounds: Mapping[Hashable, int]) -> Iterator[tuple[int, int, int]]:
        """Yield the segments of an interval, split at loops: begin, end and rounds, without loops of zero rounds.

        Args:
            stretch: index of the interval.
            rounds: numbers of rounds, by name.
        """
        for begin, end, given in self.split[stretch]:
            number = given if isinstance(given, int) else rounds[given]
            if number and begin < end:
                yield begin, end, number

    def _segments(self, stretch: int) -> Iterator[StreamSegment]:
        at = 0
        for loop in self._loops:
            if loop.stretch == stretch:
                yield StreamSegment(at, loop.begin, 1)
                rounds = loop.rounds.name if isinstance(loop.rounds, NamedRounds) else loop.rounds
                yield StreamSegment(loop.begin, loop.end, rounds)
                at = loop.end
        yield StreamSegment(at, len(self.scripts[stretch]), 1)


def peaks(
    stream: SizelessStream,
    sizes: Sequence[int],
    rounds: Mapping[Hashable, int] = NO_ROUNDS,
    other: Sequence[IntervalPeak] = (),
) -> list[IntervalPeak]:
    """Return the peak of each interval, in order.

    Args:
        stream: the stream.
        sizes: block size of each kind of storage, in bytes.
        rounds: numbers of rounds, by name.
        other: the peaks with sizes that differ only in storages of the first step.
    """
    changes = [*sizes, *map(neg, reversed(sizes))]  # changes[~kind] == -sizes[kind]
    found = [*other[: stream.first_once]]
    current = other[len(found)].begin if len(found) < len(other) else 0
    for number, script in enumerate(stream.scripts[len(found) :], len(found)):
        begun = current
        best = IntervalPeak(current, number, 0, last=False, begin=begun)
        for begin, end, times in stream.segments(number, rounds):
            before = current
            live = [*accumulate(map(changes.__getitem__, script[begin:end]), initial=before)]
            current, top = live[-1], max(live)
            further = (current - before) * (times - 1)
            if top + max(further, 0) > best.bytes:
                position = begin + live.index(top)
                best = IntervalPeak(top + max(further, 0), number, position, last=further > 0, begin=begun)
            current += further
        found.append(best)
    return found


def live_at(stream: SizelessStream, peak: IntervalPeak, rounds: Mapping[Hashable, int] = NO_ROUNDS) -> dict[int, int]:
    """Return how many storages of each kind are live at a peak; `rounds` as for `peaks`."""
    live = [0] * len(stream.kinds)

    def add(script: Sequence[int], times: int) -> None:
        for kind in script:
            if kind < 0:
                live[~kind] -= times
            else:
                live[kind] += times

    for number in range(peak.stretch + 1):
        script = stream.scripts[number]
        for begin, end, times in stream.segments(number, rounds):
            if number == peak.stretch and peak.position <= end:
                if peak.last:
                    add(script[begin:end], times - 1)
                add(script[begin : peak.position], 1)
                break
            add(script[begin:end], times)
    return {kind: count for kind, count in enumerate(live) if count}
