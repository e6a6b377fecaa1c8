"""Megatron-LM's contiguous buffers of weights and main gradients, and how the distributed optimizer cuts them.

Sources: Megatron-LM core_r0.14 core/distributed/param_and_grad_buffer.py (layout in reverse order, starts padded to 64
elements, the end to a multiple of lcm(N, 128)) and core/optimizer/distrib_optimizer.py (each rank takes an equal
stretch, in which every parameter that it meets has a tensor of its own). Without overlap there is one bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from memcalc.estimation.sharding import Held, Parameters
from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES

START_MULTIPLE = 64  # elements; for cuBLAS and 128-byte alignment of every parameter
END_MULTIPLE = 128  # elements


def lies_in_a_buffer(component: Component, zero_stage: int) -> bool:
    """Main gradients always; weights with the distributed optimizer, which gathers them there."""
    return component is Component.GRADIENTS or (component is Component.WEIGHTS and zero_stage >= 1)


def buffer_sizes(parameters: Parameters, dtype: str) -> list[int]:
    """Bytes of the buffers of one copy: one of routed experts, one of the others."""
    groups = (_laid_out(parameters, routed=routed) for routed in (False, True))
    return [DTYPE_BYTES[dtype] * group[-1][1] for group in groups if group]


def shard_sizes(parameters: Parameters, dtype: str, ranks: int, expert_ranks: int) -> list[int]:
    """Bytes of the tensors that the first rank's stretches of one copy consist of."""
    found: list[int] = []
    for routed, count in ((False, ranks), (True, expert_ranks)):
        spans = _laid_out(parameters, routed=routed)
        if spans:
            step = lcm(count, END_MULTIPLE)
            stop = -(-spans[-1][1] // step) * step // count
            found += [DTYPE_BYTES[dtype] * (min(end, stop) - start) for start, end in spans if start < stop]
    return found


def _laid_out(parameters: Parameters, *, routed: bool) -> list[tuple[int, int]]:
    """Where each parameter starts and ends, in elements."""
    spans: list[tuple[int, int]] = []
    end = 0
    for held in _reversed(parameters):
        if held.routed == routed:
            start = -(-end // START_MULTIPLE) * START_MULTIPLE
            end = start + held.elements
            spans.append((start, end))
    return spans


def _reversed(parameters: Parameters) -> Iterator[Held]:
    """One entry a tensor, from the head back to the embedding; kinds of layers one after the other."""
    for where in ("head", "layer", "embedding"):
        group = [held for held in reversed(parameters) if held.where == where]
        for _ in range(max((held.count for held in group), default=0) if where == "layer" else 1):
            yield from group
