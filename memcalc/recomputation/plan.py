"""A plan as plain data: which blocks save their activations, and which are recomputed, in which checkpoint segments.

A plan lists blocks in order. A number is a block that saves its activations. A tuple is a segment: forward saves only
its input, and when backward reaches its end the segment is recomputed, by the plan that the tuple itself is. So a tuple
inside a tuple saves only its input even then, and is recomputed twice. Nested calls of `torch.utils.checkpoint` run
such plans; the literature calls them memory-persistent schedules (Beaumont et al., Optimal checkpointing for
heterogeneous chains, arXiv 1911.13214).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.spec.recompute_plan import Segment, leaves

__all__ = ["Plan", "Segment", "all_saved", "depth", "leaves", "recompute_counts", "segmented"]


class Plan(NamedTuple):
    """The result of a strategy: its items, and the strategy's name."""

    items: Segment
    strategy: str


def depth(items: Segment) -> int:
    """Return how deeply segments are nested: 0 if nothing is recomputed."""
    return max((1 + depth(item) for item in items if not isinstance(item, int)), default=0)


def recompute_counts(items: Segment) -> dict[int, int]:
    """Return how often each block's forward is recomputed."""
    times: dict[int, int] = {}
    for item in items:
        if isinstance(item, int):
            times[item] = times.get(item, 0)
        else:
            for block, often in recompute_counts(item).items():
                times[block] = often + 1
    return times


def all_saved(blocks: int) -> Segment:
    """Return the plan without recomputation."""
    return tuple(range(blocks))


def segmented(blocks: int, spans: Iterator[tuple[int, int]]) -> Segment:
    """Return the plan that recomputes some spans [start, stop), each as one segment, and saves everything else."""
    items: list[int | Segment] = []
    position = 0
    for start, stop in spans:
        items += range(position, start)
        items.append(tuple(range(start, stop)))
        position = stop
    items += range(position, blocks)
    return tuple(items)
