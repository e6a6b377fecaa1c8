"""When a larger batch outweighs recomputation: a model of the time of a step, with all its assumptions.

Forward costs F FLOPs per sequence, backward twice that, recomputation as given by the plan. A GPU reaches
b / (b + b_half) of its rate at a micro-batch of b. Gradients are all-reduced over N ranks in a ring while backward
runs, each rank sending and receiving 2(N-1)/N of them; communication that backward does not hide is exposed.
"""

from __future__ import annotations

from typing import NamedTuple


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
