"""Peaks of allocated memory in closed form: sums over a stream of requests, without an allocator.

A loop's rounds allocate and free the same bytes, so that live memory moves by the same amount in each of them: its
maximum lies in the first round or in the last one. A loop is therefore summed once, for any number of rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.allocator.pytorch.constants import STREAM_SHIFT
from memcalc.stream.requests import Label, Requests

SIZE = (1 << STREAM_SHIFT) - 1  # of a request, without its CUDA stream


class StretchPeak(NamedTuple):
    """The peak of a stretch.

    Args:
        bytes: live bytes, rounded to the allocator's blocks.
        stretch: index of the stretch.
        position: number of its requests up to the peak.
        last: whether a loop that surrounds the position is in its last round; else in its first one.
    """

    bytes: int
    stretch: int
    position: int
    last: bool


class _Segment(NamedTuple):
    """Requests of a stretch between borders of loops: positions, and how often they run."""

    begin: int
    end: int
    rounds: int


def segments(requests: Requests, stretch: int) -> Iterator[_Segment]:
    """Yield the requests of a stretch, with its loops apart."""
    at = 0
    for loop in requests.loops:
        if loop.stretch == stretch:
            yield _Segment(at, loop.begin, 1)
            yield _Segment(loop.begin, loop.end, loop.rounds)
            at = loop.end
    yield _Segment(at, len(requests.stretches[stretch].script), 1)


def peaks(requests: Requests) -> list[StretchPeak]:
    """Return the peak of each stretch, in order."""
    sizes: list[int] = []  # of the block of each request
    found: list[StretchPeak] = []
    current = 0
    for number, interval in enumerate(requests.stretches):
        best = StretchPeak(current, number, 0, last=False)
        script = interval.script
        for begin, end, rounds in segments(requests, number):
            before, top, place = current, -1, begin
            for position in range(begin, end):
                change = script[position]
                if change > 0:
                    size = rounded(change & SIZE)
                    sizes.append(size)
                    current += size
                    if current > top:
                        top, place = current, position + 1
                elif change:
                    current -= sizes[~change]
                else:
                    sizes.append(0)
            further = (current - before) * (rounds - 1)
            if top >= 0 and top + max(further, 0) > best.bytes:
                best = StretchPeak(top + max(further, 0), number, place, last=further > 0)
            current += further
        found.append(best)
    return found


class Live(NamedTuple):
    """What is live of one label: storages, and their bytes as requested and in blocks."""

    count: int = 0  # type: ignore[assignment] # hides tuple.count, which nothing here needs
    requested: int = 0
    blocks: int = 0

    def more(self, count: int, size: int) -> Live:
        """Return the sum with so many storages of a size."""
        return Live(self.count + count, self.requested + count * size, self.blocks + count * rounded(size))


def live_at(requests: Requests, peak: StretchPeak) -> dict[Label, Live]:
    """Return what is live at a peak, by label."""
    live: dict[Label, Live] = {}
    sizes: list[int] = []  # of each request

    def add(script: Sequence[int], rounds: int, first: int) -> None:
        """Count the requests of so many rounds; `first`: the number of the first storage."""
        for change in script:
            storage = first if change >= 0 else ~change
            if storage == len(sizes):
                sizes.append(change & SIZE)
            first += change >= 0
            label = requests.labels[storage]
            live[label] = live.get(label, Live()).more(rounds if change >= 0 else -rounds, sizes[storage])

    for number, interval in enumerate(requests.stretches[: peak.stretch + 1]):
        for begin, end, rounds in segments(requests, number):
            first = len(sizes)
            if number == peak.stretch and peak.position <= end:
                if peak.last:
                    add(interval.script[begin:end], rounds - 1, first)
                add(interval.script[begin : peak.position], 1, first)
                return {label: found for label, found in live.items() if found.blocks}
            add(interval.script[begin:end], rounds, first)
    raise ValueError(peak)
