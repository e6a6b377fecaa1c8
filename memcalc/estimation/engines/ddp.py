"""DistributedDataParallel: gradient buckets (torch torch/csrc/distributed/c10d/reducer.cpp)."""

from __future__ import annotations

from memcalc.estimation.choice import Choice
from memcalc.estimation.engines.buffers import Buffers, buffer
from memcalc.estimation.items import from_phase
from memcalc.estimation.sharding import Parameters
from memcalc.spec.recipes import RECIPES


def ddp(parameters: Parameters, choice: Choice) -> Buffers:
    """Return the buckets: a second copy of the gradients, live from construction on (gradient_as_bucket_view=False).

    The first backward fills one bucket with all gradients. The second forward frees it and allocates buckets of 25 MiB
    in the order in which gradients were produced; their total size is the same. Gradients are all-reduced inside the
    buckets, one bucket at a time. No bucket is freed before the optimizer step: `.grad` is another copy.
    """
    if RECIPES[choice.recipe].gradients is None:
        return Buffers()  # main gradients are one contiguous buffer, reduced in place (Megatron-LM)
    elements: dict[str, int] = {}
    for held in parameters:
        if held.trains:  # a frozen parameter is in no bucket
            dtype = held.dtype or choice.base
            elements[dtype] = elements.get(dtype, 0) + held.count * held.elements
    source = "torch 2.13 c10d/reducer.cpp: buckets"
    mask = from_phase("optimizer")
    return Buffers(
        tuple(buffer("gradient buckets", count, dtype, mask, "P", source) for dtype, count in elements.items())
    )
