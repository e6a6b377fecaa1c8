"""DistributedDataParallel: gradient buckets (torch torch/csrc/distributed/c10d/reducer.cpp)."""

from __future__ import annotations

from memcalc.layout.local_parameters import LocalParameters
from memcalc.ledger.row_drafts import from_phase
from memcalc.phase_peaks.layer_buffers import EngineBuffers, buffer
from memcalc.spec.recipes import RECIPES
from memcalc.states.state_options import StateOptions


def ddp(parameters: LocalParameters, options: StateOptions) -> EngineBuffers:
    """Return the buckets: a second copy of the gradients, live from construction on (gradient_as_bucket_view=False).

    The first backward fills one bucket with all gradients. The second forward frees it and allocates buckets of 25 MiB
    in the order in which gradients were produced; their total size is the same. Gradients are all-reduced inside the
    buckets, one bucket at a time. No bucket is freed before the optimizer step: `.grad` is another copy.
    """
    if RECIPES[options.recipe].gradients is None:
        return EngineBuffers()  # main gradients are one contiguous buffer, reduced in place (Megatron-LM)
    elements: dict[str, int] = {}
    for parameter in parameters:
        if parameter.trains:  # a frozen parameter is in no bucket
            dtype = parameter.dtype or options.base
            elements[dtype] = elements.get(dtype, 0) + parameter.count * parameter.elements
    source = "torch 2.13 c10d/reducer.cpp: buckets"
    mask = from_phase("optimizer")
    return EngineBuffers(
        tuple(buffer("gradient buckets", count, dtype, mask, "P", source) for dtype, count in elements.items())
    )
