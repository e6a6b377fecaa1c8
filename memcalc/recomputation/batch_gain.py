"""Gain of a plan: the largest micro-batch with and without it, when the larger one is faster, and offload instead.

The time of a step: forward costs F FLOPs per sequence, backward twice that, recomputation as given by the plan. A GPU
reaches b / (b + b_half) of its rate at a micro-batch of b. Gradients are all-reduced over N ranks in a ring while
backward runs, each rank sending and receiving 2(N-1)/N of them; communication that backward does not hide is exposed.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.recomputation.chain import Chain
from memcalc.recomputation.config_chain import ConfigChain
from memcalc.recomputation.evaluation import Evaluation
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.hardware.interconnect import system_of


class Offload(NamedTuple):
    """Blocks with offloaded activations."""

    blocks: tuple[int, ...]  # their positions
    freed_bytes: int  # not kept on the GPU at the end of forward
    waited_seconds: float  # exposed copy time in forward and backward together


def offload(chain: Chain, wanted_bytes: int, bytes_per_second: float, flops_per_second: float) -> Offload | None:
    """Return the first blocks, with the longest-lived activations, until enough is freed; None: all are not enough.

    Args:
        chain: the chain.
        wanted_bytes: to free on the GPU.
        bytes_per_second: of the link, in each direction.
        flops_per_second: of the GPU.
    """
    blocks: list[int] = []
    freed = 0
    waited = 0.0
    for position in range(len(chain) - 1):
        if freed >= wanted_bytes:
            break
        block = chain.blocks[position]
        if not block.recomputable:
            continue
        blocks.append(position)
        freed += block.inside_bytes
        copy = block.inside_bytes / bytes_per_second
        compute = block.flops / flops_per_second
        waited += max(copy - compute, 0.0) + max(copy - 2 * compute, 0.0)  # forward; backward takes twice as long
    return Offload(tuple(blocks), freed, waited) if freed >= wanted_bytes else None


HOST_BYTES_PER_SECOND = 25 * 10**9  # a default, not a measurement: what PCIe 4.0 x16, 31.5 GB/s on paper, may reach


class Gain(NamedTuple):
    """Gain from recomputation."""

    without: int  # the largest micro-batch without recomputation; 0: none
    most: int  # the largest micro-batch for which a plan fits
    slow_down: float  # time per sequence at `most`, relative to no recomputation, by FLOPs
    # fraction of its peak rate that the GPU reaches at `without`, below which the larger batch has the higher
    # throughput; None: never, or there is nothing to compare
    pays_below: float | None
    replayed: bool  # whether both micro-batches, and the next larger ones, have verdicts; else they are estimated


class OffloadAlternative(NamedTuple):
    """Offload of activations to the host, for the same budget."""

    # the offloaded layers, and the exposed copy time; None: offloading all of them is not enough
    offload: Offload | None
    step_seconds: float  # of a step without waiting, at the GPU's peak rate
    bytes_per_second: int  # of the link to the host, each way
    node_ranks: int  # ranks of the run on one node

    @property
    def host_bytes_per_rank(self) -> int:
        """Host memory of a rank: the activations that its GPU does not keep."""
        return 0 if self.offload is None else self.offload.freed_bytes

    @property
    def host_bytes_per_node(self) -> int:
        """Host memory of all ranks of a node."""
        return self.node_ranks * self.host_bytes_per_rank


def gain_of(batches: tuple[int, int], slow_down: float, *, replayed: bool) -> Gain:
    """Return the gain from the largest micro-batches without and with a plan."""
    without, most = batches
    half = break_even(without, most, slow_down) if 0 < without < most else None
    return Gain(without, most, slow_down, None if half is None else without / (without + half), replayed)


def offloaded(
    configured: ConfigChain, before: Evaluation, budget: int, gpu: GpuSpec | None, bytes_per_second: int
) -> OffloadAlternative | None:
    """Return offload in place of recomputation; None: everything fits, or the GPU's rate is unknown."""
    if gpu is None or gpu.bf16_tflops is None or before.peak_bytes <= budget:
        return None
    rate = gpu.bf16_tflops * 1e12
    found = offload(configured.chain, before.peak_bytes - budget, bytes_per_second, rate)
    node_ranks = min(system_of(gpu).node, configured.spec.parallelism.ranks)
    return OffloadAlternative(found, 3 * configured.chain.flops / rate, bytes_per_second, node_ranks)


class Machine(NamedTuple):
    """The hardware of a step; rates are given or measured, never guessed."""

    flops_per_second: float  # a GPU's rate under full load
    half_batch: float = 0.0  # the micro-batch at which it reaches half of that; 0: full rate at any batch
    ranks: int = 1  # data-parallel ranks
    link_bytes_per_second: float = float("inf")  # that a rank sends in the ring
    fixed_seconds: float = 0.0  # of a step, independent of the batch: the optimizer's update, the host


def step_seconds(machine: Machine, batch: int, forward_flops: int, again_flops: int, gradient_bytes: int) -> float:
    """Return the seconds of a step of one micro-batch; FLOPs are for the whole micro-batch."""
    rate = machine.flops_per_second * batch / (batch + machine.half_batch)
    forward = forward_flops / rate
    backward = (2 * forward_flops + again_flops) / rate
    ring = 2 * (machine.ranks - 1) / machine.ranks * gradient_bytes / machine.link_bytes_per_second
    exposed = max(ring - backward, 0.0)
    return forward + backward + exposed + machine.fixed_seconds


def gain(
    machine: Machine,
    before: tuple[int, int],
    after: tuple[int, int],
    flops_of_one: int,
    gradient_bytes: int,
) -> float:
    """Return the throughput ratio of after to before, each given as (micro-batch, FLOPs of recomputation)."""
    speeds = []
    for batch, again in (before, after):
        speeds.append(batch / step_seconds(machine, batch, batch * flops_of_one, again, gradient_bytes))
    return speeds[1] / speeds[0]


def slow_down(forward_flops: int, again_flops: int) -> float:
    """Return the time of a step relative to no recomputation, by FLOPs: (3F + again) / 3F."""
    return (3 * forward_flops + again_flops) / (3 * forward_flops) if forward_flops else 1.0


def break_even(before: int, after: int, slow_down: float) -> float | None:
    """Return the b_half above which the larger micro-batch has the higher throughput; None: never.

    A sequence takes time proportional to (b + b_half) / b, with recomputation `slow_down` times that. Both are equal if
    b_half·(after - slow_down·before) = (slow_down - 1)·before·after.

    Args:
        before: micro-batch without recomputation.
        after: micro-batch with it.
        slow_down: time per sequence relative to no recomputation, by FLOPs.
    """
    room = after - slow_down * before
    return (slow_down - 1) * before * after / room if room > 0 else None
