"""Allocator replays of single configurations of a grid: its Pareto front, and those closest to their GPU's memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memcalc.progress import Progress, silent
from memcalc.sweeping.pareto_front import GrowthAxes
from memcalc.sweeping.table import Table
from memcalc.sweeping.verdict_terms import ANSWERS, CLOSE, DOES_NOT_FIT, FITS
from memcalc.verdict.judge import size

MOST_OF_FRONT = 32  # replays made to find the front; each takes 0.1 s to several seconds


def replay(table: Table, closest: int = 0, progress: Progress = silent) -> Table:
    """Return the table with replays of its Pareto front and of the configurations closest to their GPU's memory.

    A replay changes reserved and device memory and the verdict; allocated memory stays that of the formulas. If the
    GPU's usable memory is within the interval of the replay's errors, the configuration stays close.

    Args:
        table: table of a whole grid; without a GPU nothing is replayed.
        closest: number of configurations to replay, those with device memory closest to the usable memory.
        progress: called with the number of replays made.
    """
    judged = table.usable_bytes >= 0
    if not (table.valid & judged).any():
        return table
    replays = _Replays(table, progress)
    replays.closest(closest)
    replays.front(MOST_OF_FRONT)
    return replays.table


class _Replays:
    """Replays of a table's configurations."""

    def __init__(self, table: Table, progress: Progress) -> None:
        self.table = replace(table, judgement=table.judgement.copy())
        self._progress, self._count = progress, 0

    def closest(self, count: int) -> None:
        """Replay the configurations closest to their GPU's usable memory, in grid order among equals."""
        table = self.table
        numbers = np.flatnonzero(table.can_replay & (table.usable_bytes >= 0))
        distance = np.abs(table.device_bytes - table.usable_bytes)[numbers]
        for number in numbers[np.argsort(distance, kind="stable")[: max(count, 0)]].tolist():
            self._replay(number)

    def front(self, most: int) -> None:
        """Replay the front until every member that can be replayed is, or `most` replays are made.

        A replay that does not fit moves the front. Bisection finds its new place, since the next smaller configuration
        that certainly fits may be far away.
        """
        front, last = GrowthAxes(self.table), self._count + most
        can = self.table.can_replay
        while self._count < last:
            waiting = np.flatnonzero(front.members() & can & ~self.table.replayed)
            if not len(waiting):
                return
            number = int(waiting[0])
            if self._replay(number) != DOES_NOT_FIT:
                continue
            smaller = [other for other in front.smaller(number) if can[other]]
            low, high = self._last_that_fits(smaller), len(smaller)
            while high - low > 1 and self._count < last:
                middle = (low + high) // 2
                if self._replay(smaller[middle]) == DOES_NOT_FIT:
                    high = middle
                else:
                    low = middle

    def _last_that_fits(self, numbers: list[int]) -> int:
        """Return the position of the last configuration that fits; -1: none fits."""
        return max((place for place, number in enumerate(numbers) if self.table.verdict[number] == FITS), default=-1)

    def _replay(self, number: int) -> int:
        """Replay one configuration, unless it has been replayed, and return its verdict."""
        table = self.table
        if not table.replayed[number]:
            result = size(table.spec(number))
            memory, answer = result.headline.memory(), result.verdict
            assert result.confidence == "replay"
            assert answer is not None
            assert memory.reserved_bytes is not None
            assert memory.device_bytes is not None
            table.reserved_bytes[number] = memory.reserved_bytes
            table.device_bytes[number] = memory.device_bytes
            table.verdict[number] = CLOSE if answer == "unknown" else ANSWERS.index(answer)
            table.replayed[number] = True
            self._count += 1
            self._progress("replays", self._count)
        return int(table.verdict[number])
