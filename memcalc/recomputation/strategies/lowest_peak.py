"""The plan with the lowest peak: the smallest feasible budget, in exact bytes, and its plan."""

from __future__ import annotations

import numpy as np

from memcalc.recomputation.chain import Chain
from memcalc.recomputation.plan import Plan, Segment
from memcalc.recomputation.strategies.interval_costs import Numbers


class _LowestPeaks:
    """The lowest peak of every interval, input included: the recursion of `pareto` for memory alone."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        size = len(chain)
        self.inner = np.full((size, size), np.iinfo(np.int64).max)
        self.bare = np.array([block.bare_top for block in chain.blocks], dtype=np.int64)
        for j in range(size):
            for i in range(j, -1, -1):
                if i < j and not i < chain.reach[i] > j:
                    break
                self.inner[i, j] = self.saved(i, j)
                if i < j:
                    self.inner[i, j] = min(self.inner[i, j], int(self.segments(i, j).min()))

    def saved(self, i: int, j: int) -> int:
        """Return the peak if block i is saved, or recomputed alone."""
        block, aside = self.chain.blocks[i], self.chain.backward_aside
        if i == j:
            return block.recompute_top + aside[i]
        beside = aside[j] + self.chain.blocks[j].output_bytes
        rest = block.input_bytes + block.inside_bytes + int(self.inner[i + 1, j])
        return max(block.forward_top + beside, block.rerun_top + aside[i], rest)

    def segments(self, i: int, j: int) -> Numbers:
        """Return the peaks if an interval begins with a segment, by the first block after it, from i + 1 to j."""
        held = self.chain.blocks[i].input_bytes
        floors = held + self.bare[i:j]
        floors[0] -= held
        floors = np.maximum.accumulate(floors) + self.chain.backward_aside[j] + self.chain.blocks[j].output_bytes
        return np.maximum(np.maximum(floors, self.inner[i, i:j]), held + self.inner[i + 1 : j + 1, j])

    def items(self, i: int, j: int) -> Segment:
        """Return the plan of an interval."""
        items: list[int | Segment] = []
        while i <= j:
            if i == j or self.saved(i, j) <= self.segments(i, j).min():
                items.append(i)
                i += 1
            else:
                q = i + 1 + int(self.segments(i, j).argmin())
                items.append(self.items(i, q - 1))
                i = q
        return tuple(items)


def smallest(chain: Chain) -> Plan:
    """Return the plan with the lowest peak; of equal ones, the one that saves a block where possible."""
    least = _LowestPeaks(chain)
    size = len(chain)
    below = [0] * size
    choice = [0] * size
    for i in range(size - 1, -1, -1):
        block = chain.blocks[i]
        kept = max(block.forward_top + chain.forward_aside[i], block.backward_top + chain.backward_aside[i])
        if i < size - 1:
            kept = max(kept, block.input_bytes + block.inside_bytes + below[i + 1])
        below[i], choice[i] = kept, i
        floor = 0
        for q in range(i + 1, chain.reach[i] + 1):
            own = block.input_bytes if q - 1 > i else 0
            floor = max(floor, own + chain.blocks[q - 1].bare_top + chain.forward_aside[q - 1])
            need = max(floor, int(least.inner[i, q - 1]), block.input_bytes + below[q])
            if need < below[i]:
                below[i], choice[i] = need, q
    items: list[int | Segment] = []
    i = 0
    while i < size:
        q = choice[i]
        items.append(i if q == i else least.items(i, q - 1))
        i = max(q, i + 1)
    return Plan(tuple(items), "smallest")
