"""Minimum FLOPs of repeated recomputation for every interval of blocks, by memory slots.

An interval is blocks i to j; its input is live, and the gradient of its output has been produced. Its slots count all
memory except its input. It saves block i and continues with i+1 to j; or runs i to q-1 saving nothing, continues with
q to j, and then is an interval i to q-1 (Beaumont et al., arXiv 1911.13214, theorem 1). If it saves everything, its
need is exact in bytes; if parts are recomputed more often, live memory meanwhile is rounded to slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from memcalc.recomputation.chain import Chain
from memcalc.recomputation.plan import Segment

NEVER = np.int64(1) << 60  # FLOPs of a plan that does not fit; the sum of three still fits an int64

Numbers = Any  # an array of int64


class Memory:
    """Slots of memory, and the rounding of bytes to slots.

    Args:
        unit: bytes of a slot.
        base: permanently allocated bytes, outside all slots.
        up: whether live memory is rounded up; else down.
    """

    def __init__(self, unit: int, base: int, *, up: bool) -> None:
        self.unit = unit
        self.base = base
        self.up = up

    def slots_of(self, amount: int) -> int:
        """Return the slots of memory that is live while something else runs."""
        return -(-amount // self.unit) if self.up else amount // self.unit

    def first(self, need: int) -> int:
        """Return the smallest number of slots for a peak that includes `base`."""
        return max(-(-(need - self.base) // self.unit), 0)


class RecomputableIntervals:
    """Return the intervals between two borders in which all blocks are recomputable.

    Args:
        chain: the chain.
        start: the first block.
        stop: the block after the last.
        memory: the rounding of bytes to slots.
        slots: the largest number of slots.
    """

    def __init__(self, chain: Chain, start: int, stop: int, memory: Memory, slots: int) -> None:
        self.chain = chain
        self.start, self.stop = start, stop
        self.memory = memory
        self.width = slots + 1
        blocks = chain.blocks
        self.costs = np.concatenate([[0], np.cumsum([block.flops for block in blocks], dtype=np.int64)])
        self.inputs = np.array([block.input_bytes for block in blocks], dtype=np.int64)
        self.outputs = np.array([block.output_bytes for block in blocks], dtype=np.int64)
        self.saved = np.array([block.inside_bytes for block in blocks], dtype=np.int64) + self.outputs
        self.forward = np.array([block.forward_top for block in blocks], dtype=np.int64) - self.inputs
        self.backward = np.array([block.rerun_top for block in blocks], dtype=np.int64) - self.inputs
        self.bare = np.array([block.bare_top for block in blocks], dtype=np.int64)
        self.aside = np.array(chain.backward_aside, dtype=np.int64)
        self.needs: list[Numbers] = []  # by length minus one, then start: bytes if everything is saved
        self.tables: list[Numbers] = []  # by length minus one, then start, then slots: minimum FLOPs
        self._least: list[Numbers] = []  # the first slot with any plan
        self._paid: list[Numbers] = []  # including the first forward of the interval
        self._behind: list[Numbers] = []  # with the interval's input live, too
        count = stop - start
        for length in range(1, (count if chain.longest is None else min(count, chain.longest)) + 1):
            self._add(length, count - length + 1)

    def _add(self, length: int, rows: int) -> None:
        """Add the intervals of one length, from those of all shorter ones."""
        first = np.arange(self.start, self.start + rows)
        last = first + length - 1
        if length == 1:
            recompute_flops = np.array([block.recompute_top for block in self.chain.blocks], dtype=np.int64)
            need = (recompute_flops - self.inputs + self.aside)[first]
            table = np.full((rows, self.width), NEVER)
        else:
            beside = self.aside[last] + self.outputs[last]
            floor = np.maximum(self.forward[first] + beside, (self.backward + self.aside)[first])
            need = np.maximum(floor, self.saved[first] + self.needs[-1][1:])
            table = self._joined(length, first, beside, floor)
        cheapest = self._cheapest(first, length)
        for row, everything in enumerate(need.tolist()):
            full = self.memory.first(everything)
            table[row, full:] = 0
            if not self.memory.up:  # with less memory something is recomputed, regardless of rounding
                np.maximum(table[row, :full], cheapest[row], out=table[row, :full])
        self.needs.append(need)
        self.tables.append(table)
        fits = table < NEVER
        self._least.append(np.where(fits.any(axis=1), np.argmax(fits, axis=1), self.width))
        self._paid.append(np.minimum(table + (self.costs[last + 1] - self.costs[first])[:, None], NEVER))
        behind = np.full_like(table, NEVER)
        for row, amount in enumerate(self.inputs[first].tolist()):
            moved(behind[row], table[row], self.memory.slots_of(amount))
        self._behind.append(behind)

    def _cheapest(self, first: Numbers, length: int) -> Numbers:
        """Return the FLOPs of the cheapest block that an interval could recompute: any but its last one."""
        if length == 1:
            return np.full(len(first), NEVER)
        flops = np.diff(self.costs)
        return np.lib.stride_tricks.sliding_window_view(flops[first[0] : first[-1] + length - 1], length - 1).min(
            axis=1
        )

    def _joined(self, length: int, first: Numbers, beside: Numbers, floor: Numbers) -> Numbers:
        """Return the minimum of saving the first block, and of starting with a segment of each size."""
        rows = len(first)
        table = np.full((rows, self.width), NEVER)
        for row, (amount, enough) in enumerate(zip(self.saved[first].tolist(), floor.tolist(), strict=True)):
            moved(table[row], self.tables[-1][row + 1], self.memory.slots_of(amount))
            table[row, : self.memory.first(enough)] = NEVER
        sums = np.empty_like(table)
        bare = self.bare[first] - self.inputs[first]
        for size in range(1, length):
            np.add(self._paid[size - 1][:rows], self._behind[length - size - 1][size : size + rows], out=sums)
            slots = np.maximum(-(-(bare + beside - self.memory.base) // self.memory.unit), 0)
            for row in np.flatnonzero(
                slots > self._least[size - 1][:rows]
            ).tolist():  # otherwise the segment itself needs more
                sums[row, : slots[row]] = NEVER
            np.minimum(table, sums, out=table)
            bare = np.maximum(bare, self.bare[first + size])
        return table

    def cost(self, i: int, j: int, slots: int) -> int:
        """Return the minimum FLOPs beyond one forward of blocks i to j, inclusive."""
        return int(self.tables[j - i][i - self.start][slots]) if slots >= 0 else int(NEVER)

    def items(self, i: int, j: int, slots: int) -> Segment:
        """Return the plan with the cost that `cost` returns."""
        items: list[int | Segment] = []
        while i <= j:
            if slots >= self.memory.first(int(self.needs[j - i][i - self.start])):
                return (*items, *range(i, j + 1))
            q = min(self._choices(i, j, slots))[1]
            if q == i:
                items.append(i)
                slots -= self.memory.slots_of(int(self.saved[i]))
                i += 1
            else:
                items.append(self.items(i, q - 1, slots))
                slots -= self.memory.slots_of(int(self.inputs[q]))
                i = q
        return tuple(items)

    def _choices(self, i: int, j: int, slots: int) -> Iterator[tuple[int, int]]:
        """Yield the options of an interval: the cost, and the first block after its segment; i itself: i is saved."""
        beside = int(self.aside[j] + self.outputs[j])
        floor = max(int(self.forward[i]) + beside, int(self.backward[i] + self.aside[i]))
        if i < j and slots >= self.memory.first(floor):
            yield self.cost(i + 1, j, slots - self.memory.slots_of(int(self.saved[i]))), i
        floor = int(self.bare[i] - self.inputs[i]) + beside
        for q in range(i + 1, j + 1):
            if slots < self.memory.first(floor):
                return
            rest = self.cost(q, j, slots - self.memory.slots_of(int(self.inputs[q])))
            yield self.cost(i, q - 1, slots) + rest + int(self.costs[q] - self.costs[i]), q
            floor = max(floor, int(self.bare[q]) + beside)


def moved(target: Numbers, source: Numbers, by: int) -> None:
    """Write `source` to `target`, shifted by the `by` slots that are in use."""
    if by < len(target):
        target[by:] = source[: len(source) - by]
