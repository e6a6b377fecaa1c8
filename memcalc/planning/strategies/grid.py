"""The optimum on a grid of memory: for chains too long for the exact front.

What runs again together is looked up in `stretches`, over some hundred slots; the chain around it is planned over finer
slots. What is held while something else runs is rounded to slots: up, and every plan found fits; down, and no plan that
fits is missed, so its cost is a lower bound for all plans. The distance between the two is what the grid may have lost.
Moments are compared in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from memcalc.errors import InputError
from memcalc.planning.chain import Chain
from memcalc.planning.plan import Segment
from memcalc.planning.strategies.stretches import NEVER, Memory, Numbers, Stretches, moved

SLOTS = 80  # of stretches that run again
MOST_FLOPS = int(NEVER) // 2  # of a forward: what does not fit must cost more than any plan
WORK = 12 * 10**6  # slots times pairs of blocks that are looked at for the chain around them


class Grid:
    """The whole chain, for every number of slots up to a budget.

    Args:
        chain: what is planned.
        budget: bytes at the last slot.
        rounding: of what is held, "up" or "down".
        slots: how many of them at least, what is always there not counted.

    Raises:
        InputError: its FLOPs are beyond what 64 bits can compare.
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
        self.parts = max(1, min(WORK // (pairs * slots), room // slots))  # fine slots in a coarse one
        held = [block.input_bytes for block in blocks] + [block.inside_bytes + block.output_bytes for block in blocks]
        unit = _unit(room, slots * self.parts, held, up=up)
        self.fine = Memory(unit, base, up=up)
        self.slots = -(-room // unit)
        coarse = Memory(unit * self.parts, base, up=up)
        count = -(-self.slots // self.parts)
        self.stretches: dict[int, Stretches] = {}
        for start, stop in _runs(chain):
            run = Stretches(chain, start, stop, coarse, count)
            self.stretches |= dict.fromkeys(range(start, stop), run)
        self.costs = np.concatenate([[0], np.cumsum([block.flops for block in blocks], dtype=np.int64)])
        self._flops = np.diff(self.costs)
        index = np.arange(self.slots + 1)
        self._coarse = index // self.parts if self.fine.up else -(-index // self.parts)  # slot of each fine one
        self.whole: list[Numbers] = [np.full(self.slots + 1, NEVER) for _ in range(len(chain) + 1)]
        for i in range(len(chain) - 1, -1, -1):
            for _, cost in self._choices(i):
                np.minimum(self.whole[i], cost, out=self.whole[i])

    def _choices(self, i: int) -> list[tuple[int, Numbers]]:
        """What the chain may go on with at block i: i, it is kept; q, a segment i to q-1. Each with costs by slots."""
        chain, block, aside = self.chain, self.chain.blocks[i], self.chain.forward_aside
        cost = np.full(self.slots + 1, NEVER)
        if i == len(chain) - 1:
            cost[:] = 0
        else:
            moved(cost, self.whole[i + 1], self.fine.held(block.inside_bytes + block.output_bytes))
        floor = max(block.forward_top + aside[i], block.backward_top + chain.backward_aside[i])
        cost[: self.fine.first(floor - block.input_bytes)] = NEVER
        found = [(i, cost)]
        floor = 0
        for q in range(i + 1, chain.reach[i] + 1):
            own = 0 if q - 1 > i else block.input_bytes
            floor = max(floor, chain.blocks[q - 1].bare_top - own + aside[q - 1])
            cost = np.full(self.slots + 1, NEVER)
            moved(cost, self.whole[q], self.fine.held(chain.blocks[q - 1].output_bytes))
            cost += self._again(i, q - 1)
            cost += self.costs[q] - self.costs[i]
            cost[: self.fine.first(floor)] = NEVER
            found.append((q, np.minimum(cost, NEVER, out=cost)))
        return found

    def _again(self, i: int, j: int) -> Numbers:
        """What a stretch costs beyond its forward, by fine slots; where all is kept, from the very byte on."""
        run = self.stretches[i]
        coarse = run.tables[j - i][i - run.start]
        # A coarse slot that is not full counts as not there where we round up, as full where we round down.
        found = coarse[self._coarse if self.fine.up else np.minimum(self._coarse, len(coarse) - 1)]
        full = self.fine.first(int(run.needs[j - i][i - run.start]))
        found[full:] = 0
        if not self.fine.up and j > i:
            np.maximum(found[:full], int(self._flops[i:j].min()), out=found[:full])
        return found

    def slot_of(self, budget: int) -> int:
        """The slots of a budget: what is rounded up may not use more; what is rounded down may not get less."""
        room = budget - self.fine.base - self.chain.blocks[0].input_bytes
        slot = room // self.fine.unit if self.fine.up else -(-room // self.fine.unit)
        return min(max(slot, -1), self.slots)

    def again(self, budget: int) -> int | None:
        """The least FLOPs of recomputation within a budget; None: nothing fits."""
        slot = self.slot_of(budget)
        if slot < 0 or budget < self.chain.elsewhere:
            return None
        found = int(self.whole[0][slot])
        return None if found >= NEVER else found

    def items(self, budget: int) -> Segment:
        """The plan that `again` is the cost of."""
        items: list[int | Segment] = []
        i, slot = 0, self.slot_of(budget)
        while i < len(self.chain):
            q = min(self._choices_at(i, slot))[1]
            if q == i:
                block = self.chain.blocks[i]
                items.append(i)
                slot -= self.fine.held(block.inside_bytes + block.output_bytes)
                i += 1
            else:
                items.append(self._segment(i, q - 1, slot))
                slot -= self.fine.held(self.chain.blocks[q - 1].output_bytes)
                i = q
        return tuple(items)

    def _choices_at(self, i: int, slot: int) -> Iterator[tuple[int, int]]:
        """`_choices` for one number of slots: costs, and what the chain goes on with."""
        chain, block, aside = self.chain, self.chain.blocks[i], self.chain.forward_aside
        floor = max(block.forward_top + aside[i], block.backward_top + chain.backward_aside[i]) - block.input_bytes
        if slot >= self.fine.first(floor):
            rest = slot - self.fine.held(block.inside_bytes + block.output_bytes)
            yield (0 if i == len(chain) - 1 else self._cost(i + 1, rest)), i
        floor = 0
        for q in range(i + 1, chain.reach[i] + 1):
            own = 0 if q - 1 > i else block.input_bytes
            floor = max(floor, chain.blocks[q - 1].bare_top - own + aside[q - 1])
            if slot < self.fine.first(floor):
                return
            rest = self._cost(q, slot - self.fine.held(chain.blocks[q - 1].output_bytes))
            yield rest + self._again_at(i, q - 1, slot) + int(self.costs[q] - self.costs[i]), q

    def _cost(self, i: int, slot: int) -> int:
        return int(self.whole[i][slot]) if slot >= 0 else int(NEVER)

    def _again_at(self, i: int, j: int, slot: int) -> int:
        run = self.stretches[i]
        if slot >= self.fine.first(int(run.needs[j - i][i - run.start])):
            return 0
        return run.cost(i, j, slot // self.parts if self.fine.up else -(-slot // self.parts))

    def _segment(self, i: int, j: int, slot: int) -> Segment:
        run = self.stretches[i]
        if slot >= self.fine.first(int(run.needs[j - i][i - run.start])):
            return tuple(range(i, j + 1))
        return run.items(i, j, slot // self.parts if self.fine.up else -(-slot // self.parts))


def _runs(chain: Chain) -> list[tuple[int, int]]:
    """Stretches within which any blocks may share a segment: up to a border, or a block that runs once."""
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


def _unit(room: int, slots: int, held: list[int], *, up: bool) -> int:
    """Bytes of a slot: of up to half as many more slots the number at which rounding what is held loses least."""
    counts = np.linspace(slots, slots + slots // 2, 200).astype(np.int64)
    units = np.maximum(-(-room // counts), 1)
    sizes = np.array([size for size in held if size], dtype=np.int64)[:, None]
    rest = sizes % units
    lost = (np.where(rest, units - rest, 0) if up else rest).sum(axis=0)
    return int(units[int(np.argmin(lost))])
