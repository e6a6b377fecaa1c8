"""Offload as an alternative: saved activations are copied to the host during forward, and back for backward.

Copies overlap with compute if the link is fast enough: a layer's activations are copied while its forward runs. The
remaining copy time is exposed.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.recomputation.chain import Chain


class Offload(NamedTuple):
    """Blocks with offloaded activations.

    Args:
        blocks: their positions.
        freed_bytes: not kept on the GPU at the end of forward.
        waited_seconds: exposed copy time in forward and backward together.
    """

    blocks: tuple[int, ...]
    freed_bytes: int
    waited_seconds: float


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
