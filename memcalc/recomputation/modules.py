"""Chains of the user's `nn.Module`s: each is run on fake tensors, and the chain is planned like any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memcalc.recomputation.chain import Chain, ChainBlock
from memcalc.recomputation.plan import Segment

if TYPE_CHECKING:
    from memcalc.step.module_chain import PlannedModules
    from memcalc.step.module_run import OptimizerFactory
    from memcalc.tracing.module import UserModule
    from memcalc.tracing.module_chain import MeasuredModule, MeasuredModules


def measured(
    modules: Sequence[UserModule], given: Any, gpu: str | None = None, optimizer: OptimizerFactory | None = None
) -> MeasuredModules:
    """Return the memory and FLOPs of each module. Needs torch; see `memcalc.tracing.module_chain.measure_modules`."""
    from memcalc.tracing.module_chain import measure_modules

    return measure_modules(modules, given, gpu, optimizer)


def as_block(module: MeasuredModule) -> ChainBlock:
    """Return a measured module as a block of a chain. Input memory that a module frees still counts as live."""
    return ChainBlock(
        module.name,
        module.input_bytes,
        max(module.inside_bytes, 0),
        module.output_bytes,
        module.flops,
        module.left_bytes,
        module.forward_top,
        module.bare_top,
        module.backward_top,
        module.backward_top,
        max(module.again_top, module.backward_top),
    )


def chain_of_modules(
    modules: Sequence[UserModule], given: Any, gpu: str | None = None, optimizer: OptimizerFactory | None = None
) -> Chain:
    """Return the chain of consecutive modules, with an optimizer step.

    Args:
        modules: in order, each from one tensor to one tensor; the last one computes the loss, and is never recomputed.
        given: the first one's input; its values are not read.
        gpu: the GPU to run operators of; None: an A100 80 GB.
        optimizer: parameters to an optimizer, for example `torch.optim.Adam`; None: no optimizer.

    Raises:
        InputError: a module does not return a single tensor, or returns nothing that has a gradient.
    """
    found = measured(modules, given, gpu, optimizer)
    blocks = tuple(as_block(module) for module in found.modules)
    gradients = sum(block.left_bytes for block in blocks)
    step = found.resident_bytes + gradients + blocks[0].input_bytes + found.step_top
    return Chain(blocks, found.resident_bytes, elsewhere=step)


def planned(modules: Sequence[UserModule], items: Segment) -> PlannedModules:
    """Return the modules as one module that runs a plan with `torch.utils.checkpoint`."""
    from memcalc.step.module_chain import PlannedModules

    return PlannedModules(modules, items)
