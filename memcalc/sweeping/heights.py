"""Points of a pass that may be its peak, as sums of storage sizes: one matrix for any number of batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from memcalc.simulation.step_recorder import EXISTING
from memcalc.stream.peaks import IntervalPeak, SizelessStream


class Heights:
    """The points of one pass: where a storage is allocated and the next request frees one, in any round that matters.

    Args:
        stream: the requests of a step.
        phase: the pass.
        rounds: the rounds of loops with names.

    Attributes:
        points: the points; their bytes are not set.
        sums: how many storages of each kind are live at each point, less those that exist before the step.
            [points, kinds]
    """

    def __init__(self, stream: SizelessStream, phase: str, rounds: Mapping[Hashable, int]) -> None:
        self.points: list[IntervalPeak] = []
        self._level: Counter[int] = Counter()  # live storages by kind
        self._rows: list[Counter[int]] = []
        existing: Counter[int] = Counter()
        for number, (each, script) in enumerate(zip(stream.phases, stream.scripts, strict=True)):
            if each == phase:
                self._note(number, 0)
            for begin, end, times in stream.segments(number, rounds):
                self._add(number, begin, script[begin:end], times, noted=each == phase)
            if each == EXISTING:
                existing = self._level.copy()
            if each == phase:
                break
        self.sums: npt.NDArray[np.float64] = np.zeros((len(self._rows), len(stream.kinds)))
        for index, row in enumerate(self._rows):
            for kind, storages in row.items():
                self.sums[index, kind] = storages - existing[kind]

    def _add(self, stretch: int, begin: int, script: Sequence[int], rounds: int, *, noted: bool) -> None:
        """Add the requests of several rounds, and record the points of the first and the last round."""
        before, first = self._level.copy(), len(self.points)
        for position, kind in enumerate(script, 1):
            self._level[kind if kind >= 0 else ~kind] += 1 if kind >= 0 else -1
            if noted and kind >= 0 and (position == len(script) or script[position] < 0):
                self._note(stretch, begin + position)
        if rounds == 1:
            return
        further = Counter({kind: (each - before[kind]) * (rounds - 1) for kind, each in self._level.items()})
        for index in range(first, len(self.points)):
            self.points.append(self.points[index]._replace(last=True))
            self._rows.append(_sum(self._rows[index], further))
        self._level = _sum(self._level, further)

    def _note(self, stretch: int, position: int) -> None:
        self.points.append(IntervalPeak(0, stretch, position, last=False))
        self._rows.append(self._level.copy())


def _sum(one: Counter[int], other: Counter[int]) -> Counter[int]:
    found = one.copy()
    found.update(other)
    return found
