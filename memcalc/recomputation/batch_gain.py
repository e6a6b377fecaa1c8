"""Gain of a plan: the largest micro-batch with and without it, when the larger one is faster, and offload instead."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.recomputation.chain import Chain
from memcalc.recomputation.config_chain import ConfigChain
from memcalc.recomputation.evaluation import Evaluation
from memcalc.recomputation.throughput import break_even
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.hardware.interconnect import system_of

# Offload as an alternative: saved activations are copied to the host during forward, and back for backward.
# Copies overlap with compute if the link is fast enough: a layer's activations are copied while its forward runs. The
# remaining copy time is exposed.


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
