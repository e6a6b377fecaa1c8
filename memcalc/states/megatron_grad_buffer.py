"""Megatron-LM's contiguous buffers of weights and main gradients, and how the distributed optimizer shards them.

Sources: Megatron-LM core_r0.14 core/distributed/param_and_grad_buffer.py (layout in reverse order, starts padded to 64
elements, the end to a multiple of lcm(N, 128)) and core/optimizer/distrib_optimizer.py (each rank takes an equal
contiguous slice, with a separate tensor for every parameter in it). Without overlap there is one bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import lcm

from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES

START_MULTIPLE = 64  # elements; cuBLAS and 128-byte alignment of every parameter
END_MULTIPLE = 128  # elements


def is_in_buffer(component: Component, zero_stage: int) -> bool:
    """Return whether a copy is in a buffer: main gradients; weights only with the distributed optimizer.

    The distributed optimizer all-gathers weights in the buffer.
    """
    return component is Component.GRADIENTS or (component is Component.WEIGHTS and zero_stage >= 1)


def buffer_sizes(parameters: LocalParameters, dtype: str) -> list[int]:
    """Return the bytes of the buffers of one copy: one for routed experts, one for all others."""
    groups = (_laid_out(parameters, routed=routed) for routed in (False, True))
    return [DTYPE_BYTES[dtype] * group[-1][1] for group in groups if group]


def shard_sizes(parameters: LocalParameters, dtype: str, ranks: int, expert_ranks: int) -> list[int]:
    """Return the bytes of the tensors in the first rank's slices of one copy."""
    found: list[int] = []
    for routed, count in ((False, ranks), (True, expert_ranks)):
        spans = _laid_out(parameters, routed=routed)
        if spans:
            stop = _share(spans[-1][1], count)
            found += [DTYPE_BYTES[dtype] * (min(end, stop) - start) for start, end in spans if start < stop]
    return found


def buffer_elements(ordered: Sequence[LocalParameter], ranks: int, *, pads: bool) -> int:
    """Return the elements of a buffer, given all parameters in registration order.

    Args:
        ordered: the parameters.
        ranks: the ranks that share it.
        pads: whether starts and the end are padded, for the distributed optimizer.
    """
    if not pads:
        return sum(parameter.elements for parameter in ordered)
    *_, (_, end) = _spans(reversed(ordered))
    return _share(end, ranks) * ranks


def rank_parts(ordered: Sequence[LocalParameter], ranks: int, rank: int) -> list[tuple[LocalParameter, int]]:
    """Return the parameters in one rank's slice of a buffer, in the buffer's order, each with its elements there.

    Args:
        ordered: all parameters, in registration order.
        ranks: the ranks that share the buffer.
        rank: one of them.
    """
    spans = [*_spans(reversed(ordered))]
    share = _share(spans[-1][1], ranks)
    begin, stop = rank * share, (rank + 1) * share
    parts = [min(end, stop) - max(start, begin) for start, end in spans]
    return [(held, part) for held, part in zip(reversed(ordered), parts, strict=True) if part > 0]


def _share(end: int, ranks: int) -> int:
    """Return the elements of one rank's slice of a buffer, given the end of its last parameter."""
    step = lcm(ranks, END_MULTIPLE)
    return -(-end // step) * step // ranks


def _spans(parameters: Iterable[LocalParameter]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each parameter, in elements, in the order in which a buffer has them."""
    end = 0
    for parameter in parameters:
        start = -(-end // START_MULTIPLE) * START_MULTIPLE
        end = start + parameter.elements
        yield start, end


def _laid_out(parameters: LocalParameters, *, routed: bool) -> list[tuple[int, int]]:
    """Return the start and end of each parameter, in elements."""
    return [*_spans(parameter for parameter in _reversed(parameters) if parameter.routed == routed)]


def _reversed(parameters: LocalParameters) -> Iterator[LocalParameter]:
    """Yield one entry per tensor, from the LM head back to the embedding; layer types follow one another."""
    for where in ("head", "layer", "embedding"):
        group = [parameter for parameter in reversed(parameters) if parameter.where == where]
        for _ in range(max((parameter.count for parameter in group), default=0) if where == "layer" else 1):
            yield from group
