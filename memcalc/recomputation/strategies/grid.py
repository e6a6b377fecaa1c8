"""The optimum on a discretized memory axis, for chains too long for the exact Pareto front.

Costs of recomputed segments are looked up in `stretches`, with some hundred slots; the chain around them is planned
with finer slots. Live memory during another computation is rounded to slots. Rounded up, every plan found fits. Rounded
down, no plan that fits is missed, so its cost is a lower bound for all plans. The difference of the two bounds the loss
from discretization. Peaks are compared in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from memcalc.errors import InputError
from memcalc.recomputation.chain import Chain
from memcalc.recomputation.plan import Segment
from memcalc.recomputation.strategies.interval_costs import NEVER, Memory, Numbers, RecomputableIntervals, moved

SLOTS = 80  # for recomputed intervals
MOST_FLOPS = int(NEVER) // 2  # of a forward: not fitting must cost more than any plan
WORK = 12 * 10**6  # slots times pairs of blocks that are evaluated for the chain around the segments


class BudgetGrid:
    """The whole chain, for every number of slots up to a budget.

    Args:
        chain: the chain.
        budget: bytes at the last slot.
        rounding: of live memory, "up" or "down".
        slots: minimum number of slots, without permanently allocated memory.

    Raises:
        InputError: its FLOPs exceed what 64 bits can compare.
    """

    def __init__(self, chain: Chain, budget: int, rounding: Literal["up", "down"], slots: int = SLOTS) -> None:
        self.chain = chain
        if chain.flops >= MOST_FLOPS:
            raise InputError(
                f"a forward of {chain.flops:.1e} FLOPs exceeds {MOST_FLOPS:.1e}, the limit of the planner.",
                "Plan for a smaller micro_batch_size or sequence_length.",
                "recompute",
            )
        blocks = chain.blocks
        base = min(*chain.forward_aside, *chain.backward_aside)
        room = max(budget - base - blocks[0].input_bytes, 1)
        up = rounding == "up"
        pairs = sum(stop - start + 1 for start, stop in enumerate(chain.reach))
        self.parts = max(1, min(WORK // (pairs * slots), room // slots))  # fine slots per coarse slot
        sizes = [block.input_bytes for block in blocks] + [block.inside_bytes + block.output_bytes for block in blocks]
        unit = _unit(room, slots * self.parts, sizes, up=up)
        self.fine = Memory(unit, base, up=up)
        self.slots = -(-room // unit)
        coarse = Memory(unit * self.parts, base, up=up)
        count = -(-self.slots // self.parts)
        self.intervals: dict[int, RecomputableIntervals] = {}
        for start, stop in _runs(chain):
            run = RecomputableIntervals(chain, start, stop, coarse, count)
            self.intervals |= dict.fromkeys(range(start, stop), run)
        self.costs = np.concatenate([[0], np.cumsum([block.flops for block in blocks], dtype=np.int64)])
        self._flops = np.diff(self.costs)
        index = np.arange(self.slots + 1)
        self._coarse = index // self.parts if self.fine.up else -(-index // self.parts)  # coarse slot of each fine one
        self.chain_costs: list[Numbers] = [np.full(self.slots + 1, NEVER) for _ in range(len(chain) + 1)]
        for i in range(len(chain) - 1, -1, -1):
            for _, cost in self._choices(i):
                np.minimum(self.chain_costs[i], cost, out=self.chain_costs[i])

    def _choices(self, i: int) -> list[tuple[int, Numbers]]:
        """Return the options at block i with costs by slots: i, it is saved; q, a segment of blocks i to q-1."""
        chain, block, aside = self.chain, self.chain.blocks[i], self.chain.forward_aside
        cost = np.full(self.slots + 1, NEVER)
        if i == len(chain) - 1:
            cost[:] = 0
        else:
            moved(cost, self.chain_costs[i + 1], self.fine.slots_of(block.inside_bytes + block.output_bytes))
        floor = max(block.forward_top + aside[i], block.backward_top + chain.backward_aside[i])
        cost[: self.fine.first(floor - block.input_bytes)] = NEVER
        found = [(i, cost)]
        floor = 0
        for q in range(i + 1, chain.reach[i] + 1):
            own = 0 if q - 1 > i else block.input_bytes
            floor = max(floor, chain.blocks[q - 1].bare_top - own + aside[q - 1])
            cost = np.full(self.slots + 1, NEVER)
            moved(cost, self.chain_costs[q], self.fine.slots_of(chain.blocks[q - 1].output_bytes))
            cost += self._recompute_flops(i, q - 1)
            cost += self.costs[q] - self.costs[i]
            cost[: self.fine.first(floor)] = NEVER
            found.append((q, np.minimum(cost, NEVER, out=cost)))
        return found

    def _recompute_flops(self, i: int, j: int) -> Numbers:
        """Return the cost of an interval beyond its forward, by fine slots; 0 from the byte at which all is saved."""
        run = self.intervals[i]
        coarse = run.tables[j - i][i - run.start]
        # A partial coarse slot counts as empty if we round up, as full if we round down.
        found = coarse[self._coarse if self.fine.up else np.minimum(self._coarse, len(coarse) - 1)]
        full = self.fine.first(int(run.needs[j - i][i - run.start]))
        found[full:] = 0
        if not self.fine.up and j > i:
            np.maximum(found[:full], int(self._flops[i:j].min()), out=found[:full])
        return found

    def slots_within(self, budget: int) -> int:
        """Return the slots of a budget: rounded up, it may not use more; rounded down, it may not get less."""
        room = budget - self.fine.base - self.chain.blocks[0].input_bytes
        slot = room // self.fine.unit if self.fine.up else -(-room // self.fine.unit)
        return min(max(slot, -1), self.slots)

    def least_recompute_flops(self, budget: int) -> int | None:
        """Return the minimum FLOPs of recomputation within a budget; None: nothing fits."""
        slot = self.slots_within(budget)
        if slot < 0 or budget < self.chain.elsewhere:
            return None
        found = int(self.chain_costs[0][slot])
        return None if found >= NEVER else found

    def items(self, budget: int) -> Segment:
        """Return the plan with the cost that `least_recompute_flops` returns."""
        items: list[int | Segment] = []
        i, slot = 0, self.slots_within(budget)
        while i < len(self.chain):
            q = min(self._choices_at(i, slot))[1]
            if q == i:
                block = self.chain.blocks[i]
                items.append(i)
                slot -= self.fine.slots_of(block.inside_bytes + block.output_bytes)
                i += 1
            else:
                items.append(self._segment(i, q - 1, slot))
                slot -= self.fine.slots_of(self.chain.blocks[q - 1].output_bytes)
                i = q
        return tuple(items)

    def _choices_at(self, i: int, slot: int) -> Iterator[tuple[int, int]]:
        """Yield `_choices` for one number of slots: the cost, and the next position."""
        chain, block, aside = self.chain, self.chain.blocks[i], self.chain.forward_aside
        floor = max(block.forward_top + aside[i], block.backward_top + chain.backward_aside[i]) - block.input_bytes
        if slot >= self.fine.first(floor):
            rest = slot - self.fine.slots_of(block.inside_bytes + block.output_bytes)
            yield (0 if i == len(chain) - 1 else self._cost(i + 1, rest)), i
        floor = 0
        for q in range(i + 1, chain.reach[i] + 1):
            own = 0 if q - 1 > i else block.input_bytes
            floor = max(floor, chain.blocks[q - 1].bare_top - own + aside[q - 1])
            if slot < self.fine.first(floor):
                return
            rest = self._cost(q, slot - self.fine.slots_of(chain.blocks[q - 1].output_bytes))
            yield rest + self._again_at(i, q - 1, slot) + int(self.costs[q] - self.costs[i]), q

    def _cost(self, i: int, slot: int) -> int:
        return int(self.chain_costs[i][slot]) if slot >= 0 else int(NEVER)

    def _again_at(self, i: int, j: int, slot: int) -> int:
        run = self.intervals[i]
        if slot >= self.fine.first(int(run.needs[j - i][i - run.start])):
            return 0
        return run.cost(i, j, slot // self.parts if self.fine.up else -(-slot // self.parts))

    def _segment(self, i: int, j: int, slot: int) -> Segment:
        run = self.intervals[i]
        if slot >= self.fine.first(int(run.needs[j - i][i - run.start])):
            return tuple(range(i, j + 1))
        return run.items(i, j, slot // self.parts if self.fine.up else -(-slot // self.parts))


def _runs(chain: Chain) -> list[tuple[int, int]]:
    """Return the intervals of blocks that may share a segment: up to a border, or a block that is not recomputable."""
    runs: list[tuple[int, int]] = []
    position = 0
    while position < len(chain) - 1:
        stop = position
        while (
            stop < len(chain) - 1
            and chain.blocks[stop].recomputable
            and (stop == position or stop not in chain.borders)
        ):
            stop += 1
        if stop > position:
            runs.append((position, stop))
        position = max(stop, position + 1)
    return runs


def _unit(room: int, slots: int, amounts: list[int], *, up: bool) -> int:
    """Return the bytes of a slot, with up to half as many more slots, that minimize the rounding loss."""
    counts = np.linspace(slots, slots + slots // 2, 200).astype(np.int64)
    units = np.maximum(-(-room // counts), 1)
    sizes = np.array([size for size in amounts if size], dtype=np.int64)[:, None]
    rest = sizes % units
    lost = (np.where(rest, units - rest, 0) if up else rest).sum(axis=0)
    return int(units[int(np.argmin(lost))])
