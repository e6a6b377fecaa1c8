"""What a plan needs and costs: the training step walked through, block by block, every moment looked at."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.planning.chain import Chain
from memcalc.planning.plan import Plan, Segment, kept_all, leaves


class Moment(NamedTuple):
    """A moment and what is allocated in it."""

    bytes: int
    phase: str  # "forward", "again" or "backward", or one that no plan changes
    block: str
    position: int  # of the block; -1: none


class Evaluation(NamedTuple):
    """A plan's price.

    Args:
        peak: the peak.
        kept_bytes: what is kept when forward has ended.
        flops: of all forwards.
        again_flops: of those that are not the first.
        moments: all of them in order, where they were asked for.
    """

    peak: Moment
    kept_bytes: int
    flops: int
    again_flops: int
    moments: tuple[Moment, ...]

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak."""
        return self.peak.bytes


class _Walk:
    """The state of the walk: bytes of activations held, forwards run, the peak."""

    def __init__(self, chain: Chain, *, record: bool) -> None:
        self.chain = chain
        self.held = 0
        self.flops = 0
        self.kept_bytes = 0
        self.peak = Moment(chain.elsewhere, chain.elsewhere_name, "", -1)
        self.moments: list[Moment] = []
        self.record = record

    def moment(self, amount: int, phase: str, position: int) -> None:
        """Something is `amount` bytes high."""
        if amount > self.peak.bytes or self.record:
            moment = Moment(amount, phase, self.chain.blocks[position].name, position)
            if self.record:
                self.moments.append(moment)
            if amount > self.peak.bytes:
                self.peak = moment

    def run(self, items: Segment, again: int | None) -> None:
        """Forward and backward of some items, whose first input is held already and stays with its owner.

        Args:
            items: in order.
            again: the bytes beside a forward that runs again: states, gradients, among them that of the items' output.
                None: the first forward.
        """
        blocks, start, last = self.chain.blocks, self.held, items[-1]
        ends_early = again is not None and isinstance(last, int)
        for item in items[:-1] if ends_early else items:
            self.forward(item, again)
        if again is None:
            self.kept_bytes = self.held
        for item in reversed(items):
            end = item if isinstance(item, int) else list(leaves(item))[-1]
            block, aside = blocks[end], self.chain.backward_aside[end]
            if item is last and ends_early:
                self.moment(self.held - block.input_bytes + block.again_top + aside, "again", end)
                self.flops += block.flops if block.again_flops is None else block.again_flops
                continue
            self.held -= block.output_bytes  # the blocks behind are done with it; its gradient is of the same size
            if isinstance(item, int):
                self.held -= block.inside_bytes
                top = block.backward_top if again is None else block.rerun_top
                self.moment(self.held - block.input_bytes + top + aside, "backward", end)
            else:
                self.held -= self.staying(item)  # its tops count them
                self.run(item, aside + block.output_bytes)
        assert self.held == start

    def forward(self, item: int | Segment, again: int | None) -> None:
        """Forward of one item; afterwards its output is held, and what is inside it if it is a block."""
        phase = "forward" if again is None else "again"
        if isinstance(item, int):
            block = self.chain.blocks[item]
            aside = self.chain.forward_aside[item] if again is None else again
            self.moment(self.held - block.input_bytes + block.forward_top + aside, phase, item)
            self.flops += block.flops
            self.held += block.inside_bytes + block.output_bytes
            return
        passing = 0  # what lies between two blocks of the segment; the input of the first one is held
        for number, position in enumerate(leaves(item)):
            block = self.chain.blocks[position]
            aside = self.chain.forward_aside[position] if again is None else again
            owned = block.input_bytes if number == 0 else 0
            self.moment(self.held - owned + block.bare_top + aside, phase, position)
            self.flops += block.flops
            passing = block.output_bytes
        self.held += passing + self.staying(item)

    def staying(self, item: Segment) -> int:
        """What a recomputed block keeps all the same."""
        return sum(self.chain.blocks[position].stays_bytes for position in leaves(item))


def evaluate(chain: Chain, plan: Plan | Segment, *, record: bool = False) -> Evaluation:
    """What a plan needs: the highest of all moments of forward, of every recomputation, and of backward.

    Args:
        chain: what is planned.
        plan: an answer, or its items.
        record: whether to keep every moment.
    """
    items = plan.items if isinstance(plan, Plan) else plan
    walk = _Walk(chain, record=record)
    walk.held = chain.blocks[0].input_bytes
    walk.run(items, None)
    kept = walk.kept_bytes - chain.blocks[-1].output_bytes
    return Evaluation(walk.peak, kept, walk.flops, walk.flops - chain.flops, tuple(walk.moments))


def evaluate_all_kept(chain: Chain) -> Evaluation:
    """What the chain needs where nothing is recomputed."""
    return evaluate(chain, kept_all(len(chain)))
