"""What a plan buys: the largest micro-batch with and without, when the larger one pays, and offload in its place."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.planning.configured import Configured
from memcalc.planning.evaluation import Evaluation
from memcalc.planning.offload import Offload, offload
from memcalc.planning.throughput import break_even
from memcalc.spec.cards import Card
from memcalc.spec.systems import system_of

HOST_BYTES_PER_SECOND = 25 * 10**9  # a default, not a measurement: what PCIe 4.0 x16, 31.5 GB/s on paper, may reach


class Gain(NamedTuple):
    """What recomputation buys.

    Args:
        without: the largest micro-batch where everything is kept; 0: none.
        most: the largest that a plan fits.
        slow_down: of a sequence's step at that one: its time over that without recomputation, by FLOPs.
        pays_below: the share of its rate that a card reaches at `without`, below which the larger batch gives more
            sequences a second; None: it never does, or there is nothing to compare.
        replayed: whether both micro-batches were judged, and the next larger ones; else they are estimated.
    """

    without: int
    most: int
    slow_down: float
    pays_below: float | None
    replayed: bool


class Third(NamedTuple):
    """Activations on the host, for the same budget.

    Args:
        offload: which layers', and what is waited for; None: all of them are not enough.
        step_seconds: of a step that waits for nothing, at the card's full rate.
        bytes_per_second: of the link to the host, each way.
        node_ranks: ranks of the run on one node.
    """

    offload: Offload | None
    step_seconds: float
    bytes_per_second: int
    node_ranks: int

    @property
    def host_bytes_per_rank(self) -> int:
        """Held in host memory by a rank: what its GPU does not keep."""
        return 0 if self.offload is None else self.offload.freed_bytes

    @property
    def host_bytes_per_node(self) -> int:
        """Held in host memory by all ranks of a node."""
        return self.node_ranks * self.host_bytes_per_rank


def gain_of(batches: tuple[int, int], slow_down: float, *, replayed: bool) -> Gain:
    """The batches, and when the larger one pays."""
    without, most = batches
    half = break_even(without, most, slow_down) if 0 < without < most else None
    return Gain(without, most, slow_down, None if half is None else without / (without + half), replayed)


def offloaded(
    configured: Configured, before: Evaluation, budget: int, card: Card | None, bytes_per_second: int
) -> Third | None:
    """Offload in place of recomputation; None: everything fits, or nobody knows the card's rate."""
    if card is None or card.bf16_tflops is None or before.peak_bytes <= budget:
        return None
    rate = card.bf16_tflops * 1e12
    found = offload(configured.chain, before.peak_bytes - budget, bytes_per_second, rate)
    node_ranks = min(system_of(card).node, configured.spec.parallelism.ranks)
    return Third(found, 3 * configured.chain.flops / rate, bytes_per_second, node_ranks)
