"""Points of a pass that may be its peak, as sums of storage sizes: one matrix for any number of batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.simulation.recorded_step import EXISTING
from memcalc.simulation.stage_blocks import SizedBlock
from memcalc.stream.peaks import SIZE, StretchPeak, segments
from memcalc.stream.requests import Requests, TensorLabel

NO_BLOCK = -1
Column = tuple[int, int]  # a block and the number of a size in its program, or NO_BLOCK and bytes


class Heights:
    """The points of one pass: where a storage is allocated and the next request frees one, in any round that matters.

    Args:
        requests: of a step.
        blocks: the blocks that its labels name.
        phase: the pass.

    Attributes:
        points: the points; their bytes are not set.
        columns: the distinct sizes of storages.
        sums: how many storages of each size are live at each point, less those that exist before the step.
            [points, columns]
    """

    def __init__(self, requests: Requests, blocks: Sequence[SizedBlock], phase: str) -> None:
        self.points: list[StretchPeak] = []
        self._requests, self._blocks = requests, blocks
        self._columns: dict[Column, int] = {}
        self._column_of: list[int] = []  # of each storage
        self._level: Counter[int] = Counter()  # live storages by column
        self._rows: list[Counter[int]] = []
        existing: Counter[int] = Counter()
        for number, interval in enumerate(requests.stretches):
            if interval.phase == phase:
                self._note(number, 0, self._level)
            for begin, end, rounds in segments(requests, number):
                self._add(number, begin, interval.script[begin:end], rounds, noted=interval.phase == phase)
            if interval.phase == EXISTING:
                existing = self._level.copy()
            if interval.phase == phase:
                break
        self.columns = tuple(self._columns)
        self.sums: npt.NDArray[np.float64] = np.zeros((len(self._rows), len(self._columns)))
        for index, row in enumerate(self._rows):
            for column, storages in row.items():
                self.sums[index, column] = storages - existing[column]

    def _add(self, stretch: int, begin: int, script: Sequence[int], rounds: int, *, noted: bool) -> None:
        """Add the requests of so many rounds, and note the points of the first and the last one."""
        before, first = self._level.copy(), len(self.points)
        for position, change in enumerate(script, 1):
            if change >= 0:
                self._column_of.append(self._column(len(self._column_of), change & SIZE))
            self._level[self._column_of[-1 if change >= 0 else ~change]] += 1 if change >= 0 else -1
            if noted and change > 0 and (position == len(script) or script[position] <= 0):
                self._note(stretch, begin + position, self._level)
        if rounds == 1:
            return
        further = Counter({column: (each - before[column]) * (rounds - 1) for column, each in self._level.items()})
        for index in range(first, len(self.points)):
            self.points.append(self.points[index]._replace(last=True))
            self._rows.append(_sum(self._rows[index], further))
        self._level = _sum(self._level, further)

    def _note(self, stretch: int, position: int, level: Counter[int]) -> None:
        self.points.append(StretchPeak(0, stretch, position, last=False))
        self._rows.append(level.copy())

    def _column(self, storage: int, size: int) -> int:
        label = self._requests.labels[storage]
        column = NO_BLOCK, rounded(size)
        if isinstance(label, TensorLabel) and size:
            column = label.block, self._blocks[label.block].program.kind_of[label.storage]
        return self._columns.setdefault(column, len(self._columns))


def _sum(one: Counter[int], other: Counter[int]) -> Counter[int]:
    found = one.copy()
    found.update(other)
    return found
