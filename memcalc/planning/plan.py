"""A plan as plain data: which blocks keep their activations, and which are computed a second time, together with whom.

A plan lists blocks in order. A number is a block that keeps what is inside it. A tuple is a segment: forward keeps its
input only, and when backward reaches its end the segment runs again, by the plan that the tuple itself is; so a tuple
inside a tuple is kept as an input only even then, and runs a third time. Such plans are what nested calls of
`torch.utils.checkpoint` run, and what the literature calls memory-persistent schedules (Beaumont et al., Optimal
checkpointing for heterogeneous chains, arXiv 1911.13214).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.spec.segments import Segment, leaves

__all__ = ["Plan", "Segment", "depth", "kept_all", "leaves", "segmented", "times_again"]


class Plan(NamedTuple):
    """What a strategy answers: its items, and the strategy's name."""

    items: Segment
    strategy: str


def depth(items: Segment) -> int:
    """How deep segments lie in each other: 0 where everything is kept."""
    return max((1 + depth(item) for item in items if not isinstance(item, int)), default=0)


def times_again(items: Segment) -> dict[int, int]:
    """How often each block's forward runs again."""
    times: dict[int, int] = {}
    for item in items:
        if isinstance(item, int):
            times[item] = times.get(item, 0)
        else:
            for block, often in times_again(item).items():
                times[block] = often + 1
    return times


def kept_all(blocks: int) -> Segment:
    """The plan that keeps everything."""
    return tuple(range(blocks))


def segmented(blocks: int, spans: Iterator[tuple[int, int]]) -> Segment:
    """Everything is kept, but for some spans [start, stop), each recomputed as a whole."""
    items: list[int | Segment] = []
    position = 0
    for start, stop in spans:
        items += range(position, start)
        items.append(tuple(range(start, stop)))
        position = stop
    items += range(position, blocks)
    return tuple(items)
