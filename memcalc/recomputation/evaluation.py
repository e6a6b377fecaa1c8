"""Memory and cost of a plan: a simulation of the training step, block by block."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.recomputation.chain import Chain
from memcalc.recomputation.plan import Plan, Segment, all_saved, leaves


class PlanPoint(NamedTuple):
    """Allocated bytes at one point of the step."""

    bytes: int
    phase: str  # "forward", "again" or "backward", or a phase that no plan changes
    block: str
    position: int  # of the block; -1: none


class Evaluation(NamedTuple):
    """Memory and cost of a plan."""

    peak: PlanPoint  # the peak
    saved_bytes: int  # saved activations at the end of forward
    flops: int  # of all forwards
    recompute_flops: int  # of recomputation
    points: tuple[PlanPoint, ...]  # all points of the step in order, if requested

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak."""
        return self.peak.bytes


class _PlanSimulation:
    """The state of the simulation: live activation bytes, FLOPs so far, the peak."""

    def __init__(self, chain: Chain, *, record: bool) -> None:
        self.chain = chain
        self.live_bytes = 0
        self.flops = 0
        self.saved_bytes = 0
        self.peak = PlanPoint(chain.elsewhere, chain.elsewhere_name, "", -1)
        self.points: list[PlanPoint] = []
        self.record = record

    def note_point(self, amount: int, phase: str, position: int) -> None:
        """Record a point of the step with `amount` allocated bytes."""
        if amount > self.peak.bytes or self.record:
            moment = PlanPoint(amount, phase, self.chain.blocks[position].name, position)
            if self.record:
                self.points.append(moment)
            if amount > self.peak.bytes:
                self.peak = moment

    def run(self, items: Segment, added_bytes: int | None) -> None:
        """Simulate forward and backward of some items; their first input is live and stays live.

        Args:
            items: in order.
            added_bytes: additional bytes during a recomputation: states, gradients, including the gradient of the
                items' output.
                None: the first forward.
        """
        blocks, start, last = self.chain.blocks, self.live_bytes, items[-1]
        ends_early = added_bytes is not None and isinstance(last, int)
        for item in items[:-1] if ends_early else items:
            self.forward(item, added_bytes)
        if added_bytes is None:
            self.saved_bytes = self.live_bytes
        for item in reversed(items):
            end = item if isinstance(item, int) else list(leaves(item))[-1]
            block, aside = blocks[end], self.chain.backward_aside[end]
            if item is last and ends_early:
                self.note_point(self.live_bytes - block.input_bytes + block.recompute_top + aside, "again", end)
                self.flops += block.flops if block.recompute_flops is None else block.recompute_flops
                continue
            self.live_bytes -= block.output_bytes  # freed by later blocks; its gradient has the same size
            if isinstance(item, int):
                self.live_bytes -= block.inside_bytes
                top = block.backward_top if added_bytes is None else block.rerun_top
                self.note_point(self.live_bytes - block.input_bytes + top + aside, "backward", end)
            else:
                self.live_bytes -= self.live_after_backward(item)  # included in the blocks' tops
                self.run(item, aside + block.output_bytes)
        assert self.live_bytes == start

    def forward(self, item: int | Segment, added_bytes: int | None) -> None:
        """Simulate the forward of one item; afterwards its output is live, and for a block its activations."""
        phase = "forward" if added_bytes is None else "again"
        if isinstance(item, int):
            block = self.chain.blocks[item]
            aside = self.chain.forward_aside[item] if added_bytes is None else added_bytes
            self.note_point(self.live_bytes - block.input_bytes + block.forward_top + aside, phase, item)
            self.flops += block.flops
            self.live_bytes += block.inside_bytes + block.output_bytes
            return
        passing = 0  # boundary between two blocks of the segment; the first one's input is live
        for number, position in enumerate(leaves(item)):
            block = self.chain.blocks[position]
            aside = self.chain.forward_aside[position] if added_bytes is None else added_bytes
            owned = block.input_bytes if number == 0 else 0
            self.note_point(self.live_bytes - owned + block.bare_top + aside, phase, position)
            self.flops += block.flops
            passing = block.output_bytes
        self.live_bytes += passing + self.live_after_backward(item)

    def live_after_backward(self, item: Segment) -> int:
        """Return the bytes that recomputed blocks save."""
        return sum(self.chain.blocks[position].released_late_bytes for position in leaves(item))


def evaluate(chain: Chain, plan: Plan | Segment, *, record: bool = False) -> Evaluation:
    """Return the memory and cost of a plan: the peak over forward, all recomputations, and backward.

    Args:
        chain: the chain.
        plan: a plan, or its items.
        record: whether to keep every point of the step.
    """
    items = plan.items if isinstance(plan, Plan) else plan
    walk = _PlanSimulation(chain, record=record)
    walk.live_bytes = chain.blocks[0].input_bytes
    walk.run(items, None)
    kept = walk.saved_bytes - chain.blocks[-1].output_bytes
    return Evaluation(walk.peak, kept, walk.flops, walk.flops - chain.flops, tuple(walk.points))


def evaluate_without_recomputation(chain: Chain) -> Evaluation:
    """Return the memory and cost without recomputation."""
    return evaluate(chain, all_saved(len(chain)))
