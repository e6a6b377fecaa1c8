"""The exact optimum: the Pareto front of all plans in memory and compute.

The recursion is that of Beaumont et al. (Optimal checkpointing for heterogeneous chains, arXiv 1911.13214, theorem 1),
who compute the cheapest plan within m units of memory. Here memory is not discretized: the whole Pareto front of
(bytes, FLOPs) is kept for every interval of the chain. So nothing is rounded.

An interval is blocks i to j; its input is live, and the gradient of its output has been produced. It either saves block
i and continues with i+1 to j; or runs i to q-1 saving nothing, continues with q to j, and then is an interval i to q-1.
The whole chain is the same with its first forward, where no gradients are live.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from memcalc.recomputation.chain import Chain
from memcalc.recomputation.plan import Segment


class ParetoPoint(NamedTuple):
    """A plan for an interval."""

    need: int  # its peak, in bytes, including the interval's input, but not memory of blocks before it
    recompute_flops: int  # FLOPs of forwards beyond the interval's own
    stop: int  # the first block after its first item: one saved block, or a segment
    inside: ParetoPoint | None  # the segment's own plan; None: the block is saved
    rest: ParetoPoint | None  # the plan of what follows; None: nothing does


Front = Sequence[ParetoPoint]  # needs rising, costs falling


class TooManyPoints(Exception):
    """More points than requested."""


class ParetoFronts:
    """The Pareto fronts of all intervals of a chain.

    Args:
        chain: the chain.
        budget: bytes above which plans are ignored; None: no limit.
        max_recompute_flops: FLOPs of recomputation above which plans are ignored; None: no limit.
        effort: how many points may be evaluated.

    Raises:
        TooMuch: more points would have to be evaluated.
    """

    def __init__(
        self, chain: Chain, budget: int | None = None, max_recompute_flops: int | None = None, effort: int | None = None
    ) -> None:
        self.chain = chain
        self.budget = budget
        self.max_recompute_flops = max_recompute_flops
        self.effort = effort
        self.costs = [0, *accumulate(block.flops for block in chain.blocks)]
        self._inner: dict[tuple[int, int], Front] = {}

    @cached_property
    def chain_front(self) -> Front:
        """The front of the whole chain: each plan needs more bytes and less compute than the one before."""
        chain, blocks = self.chain, self.chain.blocks
        end = len(blocks) - 1
        last = blocks[end]
        need = max(last.forward_top + chain.forward_aside[end], last.backward_top + chain.backward_aside[end])
        behind: dict[int, Front] = {end: self._pruned([ParetoPoint(need, 0, end + 1, None, None)])}
        for i in range(end - 1, -1, -1):
            block = blocks[i]
            floor = max(block.forward_top + chain.forward_aside[i], block.backward_top + chain.backward_aside[i])
            found = list(_before(block.input_bytes + block.inside_bytes, floor, i + 1, behind[i + 1]))
            floor = 0
            for q in range(i + 1, chain.reach[i] + 1):
                passed = blocks[q - 1]
                own = block.input_bytes if q - 1 > i else 0
                floor = max(floor, own + passed.bare_top + chain.forward_aside[q - 1])
                if self._hopeless(floor, self.costs[q] - self.costs[i]):
                    break
                found += self._joined(block.input_bytes, floor, i, q, behind[q])
            behind[i] = self._pruned(found)
        # The peak that no plan changes counts once, for the whole chain.
        return self._pruned([point._replace(need=max(point.need, chain.elsewhere)) for point in behind[0]])

    def inner(self, i: int, j: int) -> Front:
        """Return the front of blocks i to j, inclusive, when they are recomputed."""
        if (i, j) not in self._inner:
            self._inner[i, j] = self._pruned(list(self._inner_points(i, j)))
        return self._inner[i, j]

    def _inner_points(self, i: int, j: int) -> Iterator[ParetoPoint]:
        chain, blocks = self.chain, self.chain.blocks
        block, aside = blocks[i], chain.backward_aside
        if i == j:
            yield ParetoPoint(block.recompute_top + aside[i], 0, i + 1, None, None)
            return
        beside = aside[j] + blocks[j].output_bytes
        floor = max(block.forward_top + beside, block.rerun_top + aside[i])
        yield from _before(block.input_bytes + block.inside_bytes, floor, i + 1, self.inner(i + 1, j))
        floor = 0
        for q in range(i + 1, j + 1):
            own = block.input_bytes if q - 1 > i else 0
            floor = max(floor, own + blocks[q - 1].bare_top + beside)
            if self._hopeless(floor, self.costs[q] - self.costs[i]):
                break
            yield from self._joined(block.input_bytes, floor, i, q, self.inner(q, j))

    def _joined(self, live: int, floor: int, i: int, q: int, rest: Front) -> Iterator[ParetoPoint]:
        """Yield a segment i to q-1 before the plans of what follows: the undominated pairs of plans."""
        inside, cost = self.inner(i, q - 1), self.costs[q] - self.costs[i]
        a = b = 0
        while a < len(inside) and b < len(rest):
            need = max(inside[a].need, live + rest[b].need, floor)
            while a + 1 < len(inside) and inside[a + 1].need <= need:
                a += 1
            while b + 1 < len(rest) and live + rest[b + 1].need <= need:
                b += 1
            yield ParetoPoint(need, cost + inside[a].recompute_flops + rest[b].recompute_flops, q, inside[a], rest[b])
            # Only more memory reduces compute: advance the plan with the smaller next point.
            next_a = inside[a + 1].need if a + 1 < len(inside) else None
            next_b = live + rest[b + 1].need if b + 1 < len(rest) else None
            if next_a is None and next_b is None:
                return
            if next_b is None or (next_a is not None and next_a <= next_b):
                a += 1
            else:
                b += 1

    def _hopeless(self, need: int, recompute_flops: int) -> bool:
        over_budget = self.budget is not None and need > self.budget
        return over_budget or (self.max_recompute_flops is not None and recompute_flops > self.max_recompute_flops)

    def _pruned(self, points: list[ParetoPoint]) -> Front:
        """Return the points that no other point beats in both memory and compute."""
        if self.effort is not None:
            self.effort -= len(points)
            if self.effort < 0:
                raise TooManyPoints
        kept: list[ParetoPoint] = []
        for point in sorted(points, key=lambda point: point[:2]):
            if self._hopeless(point.need, point.recompute_flops):
                continue
            if not kept or point.recompute_flops < kept[-1].recompute_flops:
                kept.append(point)
        return kept


def _before(live: int, floor: int, stop: int, rest: Front) -> Iterator[ParetoPoint]:
    """Return a saved block before each plan of what follows."""
    return (ParetoPoint(max(floor, live + point.need), point.recompute_flops, stop, None, point) for point in rest)


def items_of(point: ParetoPoint) -> Segment:
    """Return the plan of a point that begins with the chain's first block."""
    return _items(point, 0)


def _items(point: ParetoPoint, start: int) -> Segment:
    items: list[int | Segment] = []
    following: ParetoPoint | None = point
    while following is not None:
        items.append(start if following.inside is None else _items(following.inside, start))
        start, following = following.stop, following.rest
    return tuple(items)
