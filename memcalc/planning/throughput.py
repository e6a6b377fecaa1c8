"""When a larger batch pays for forwards that run again: a model of a step's time, with everything it assumes.

Forward costs F FLOPs a sequence, backward twice that, recomputation what the plan says. A card reaches
b / (b + b_half) of its rate at a micro-batch of b. Gradients are summed over N ranks in a ring while backward runs,
each rank sending and receiving 2(N-1)/N of them; what does not fit beside backward is waited for.
"""

from __future__ import annotations

from typing import NamedTuple


class Machine(NamedTuple):
    """What a step runs on; rates are given or measured, never guessed.

    Args:
        flops_per_second: a card's rate with as much work as it can take.
        half_batch: the micro-batch at which it reaches half of that; 0: any is enough.
        ranks: data-parallel ones.
        link_bytes_per_second: that a rank sends in the ring.
        fixed_seconds: of a step whatever the batch: the optimizer's update, the host.
    """

    flops_per_second: float
    half_batch: float = 0.0
    ranks: int = 1
    link_bytes_per_second: float = float("inf")
    fixed_seconds: float = 0.0


def step_seconds(machine: Machine, batch: int, forward_flops: int, again_flops: int, gradient_bytes: int) -> float:
    """Seconds of a step of one micro-batch; FLOPs are those of the whole micro-batch."""
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
    """Sequences a second after over before, each as (micro-batch, FLOPs of recomputation)."""
    speeds = []
    for batch, again in (before, after):
        speeds.append(batch / step_seconds(machine, batch, batch * flops_of_one, again, gradient_bytes))
    return speeds[1] / speeds[0]


def slow_down(forward_flops: int, again_flops: int) -> float:
    """Time of a step over that without recomputation, where compute alone counts: (3F + again) / 3F."""
    return (3 * forward_flops + again_flops) / (3 * forward_flops) if forward_flops else 1.0


def break_even(before: int, after: int, slow_down: float) -> float | None:
    """The b_half from which on the larger micro-batch gives more sequences a second; None: it never does.

    A sequence takes time as (b + b_half) / b, with recomputation `slow_down` times that: the two are equal where
    b_half·(after - slow_down·before) = (slow_down - 1)·before·after.

    Args:
        before: micro-batch without recomputation.
        after: micro-batch with it.
        slow_down: of a sequence's step, by FLOPs.
    """
    room = after - slow_down * before
    return (slow_down - 1) * before * after / room if room > 0 else None
