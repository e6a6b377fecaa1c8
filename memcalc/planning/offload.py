"""The third choice: what a layer keeps goes to the host during forward, and comes back for its backward.

Copies hide behind compute as far as the link is quick enough: while a layer's forward runs, its share leaves; what is
slower than that is waited for.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.planning.chain import Chain


class Offload(NamedTuple):
    """Blocks whose activations go to the host.

    Args:
        blocks: which.
        freed_bytes: that the card does not keep at the end of forward.
        waited_seconds: in forward and backward together, copies that nothing hides.
    """

    blocks: tuple[int, ...]
    freed_bytes: int
    waited_seconds: float


def offload(chain: Chain, wanted_bytes: int, bytes_per_second: float, flops_per_second: float) -> Offload | None:
    """The first blocks, whose activations wait longest, until enough is freed; None: all of them are not enough.

    Args:
        chain: what is planned.
        wanted_bytes: that the card shall not keep.
        bytes_per_second: of the link, in each direction.
        flops_per_second: of the card.
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
