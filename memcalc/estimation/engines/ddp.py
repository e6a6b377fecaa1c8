"""DistributedDataParallel: buckets (torch torch/csrc/distributed/c10d/reducer.cpp)."""

from __future__ import annotations

from memcalc.estimation.choice import Choice
from memcalc.estimation.engines.buffers import Buffers, buffer
from memcalc.estimation.items import from_phase
from memcalc.estimation.sharding import Parameters
from memcalc.spec.recipes import RECIPES


def ddp(parameters: Parameters, choice: Choice) -> Buffers:
    """Buckets hold a second copy of the gradients, from construction on (gradient_as_bucket_view=False).

    The first backward fills one bucket of everything; the second forward frees it and makes buckets of 25 MiB, in the
    order in which gradients arrived. Together they are as large. Gradients are reduced inside the buckets, in a ring
    bucket after bucket, and none is released before the optimizer's step: `.grad` is another copy.
    """
    if RECIPES[choice.recipe].gradients is None:
        return Buffers()  # the main gradients are one contiguous buffer that is reduced as it is (Megatron-LM)
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
