"""Host memory of ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity (arXiv 2104.07857), as in DeepSpeed 0.19.

runtime/zero/stage_1_and_2.py and stage3.py with offload_optimizer.device = cpu: fp32 master weights, their gradients
and the optimizer states are CPU tensors. Each reduced gradient is copied to the CPU, where the step runs; updated
weights are cast there and copied back. With offload_param.device = cpu the weights are one tensor in host memory; a
rank's shard of each is copied to the device when it is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memcalc.layout.local_parameters import LocalParameters
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, from_phase
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.optimizers.optimizer_states import optimizer_states
from memcalc.states.parameter_copies import ParameterCopy, copy_row
from memcalc.states.recipe_copies import kept_copies
from memcalc.states.state_options import StateOptions

SOURCE = "DeepSpeed 0.19 runtime/zero/"


def offloaded_states(parameters: LocalParameters, options: StateOptions, *, trains: bool) -> Iterator[RowDraft]:
    """Yield weights, master weights, gradients and states in host memory, for parameters with identical options."""
    if options.host.has_weights:
        weights = next(copy for copy in kept_copies(options, trains=False) if copy.component is Component.WEIGHTS)
        weights = weights._replace(citation=f"{SOURCE}stage3.py: _create_param_groups_fp16_flat_cpu_memory")
        yield from (copy_row(weights, each, options.spread(3)) for each in parameters)
    if not options.host.offloads or not trains:
        return
    for copy in _copies(options):
        yield from (copy_row(copy, each, options.spread(copy.sharded_from_stage)) for each in parameters)
    yield from (state.item for state in optimizer_states(parameters, options.update, options.spread(1)))


def in_one_tensor(items: Iterable[RowDraft]) -> list[RowDraft]:
    """Return the weights among host tensors: one tensor, pinned regardless of pin_memory (stage3.py)."""
    weights = [item for item in items if item.component is Component.WEIGHTS]
    each = sum(item.each * item.count for item in weights)
    return [item._replace(each=each, count=1) for item in weights[:1]]


def _copies(options: StateOptions) -> Iterator[ParameterCopy]:
    """Yield the fp32 master weights, their fp32 gradients and 16-bit copies, which exist from the start."""
    yield from (copy for copy in kept_copies(options, trains=True) if copy.component is Component.MASTER_WEIGHTS)
    whole = from_phase("optimizer")
    citation = f"{SOURCE}: the gradients of the fp32 masters, pinned"
    yield ParameterCopy(Component.GRADIENTS, " gradient in fp32", "fp32", 1, whole, citation)
    if options.zero_stage < 3:
        citation = f"{SOURCE}stage_1_and_2.py: param_buffer_of_bit16_for_cpu_offload_groups"
        name = ", updated, on its way to the device"
        yield ParameterCopy(Component.COMMUNICATION_BUFFERS, name, options.compute, 1, whole, citation)
    if options.zero_stage == 3:
        citation = f"{SOURCE}stage3.py: grad_partitions_flat_buffer"
        dtype = "fp32" if options.sums_shards else options.base
        yield ParameterCopy(Component.GRADIENTS, " gradient", dtype, 1, whole, citation)
    elif options.step.accumulates:
        citation = f"{SOURCE}stage_1_and_2.py: accumulated_grads_in_cpu"
        yield ParameterCopy(Component.GRADIENTS, " gradient, accumulated", options.base, 1, whole, citation)


def buffers(parameters: LocalParameters, options: StateOptions) -> Iterator[RowDraft]:
    """Yield the pinned buffer, as large as the largest parameter, through which stage 2 copies gradients."""
    if options.zero_stage < 3:
        yield gradient_passage(parameters, options, "temp_grad_buffer_for_cpu_offload")


def gradient_passage(parameters: LocalParameters, options: StateOptions, name: str) -> RowDraft:
    """Return the buffer, one on the device and one in host memory, through which gradients are copied to the host."""
    elements = max(parameter.elements for parameter in parameters)
    each = elements * DTYPE_BYTES[options.compute]
    return RowDraft(
        Component.COMMUNICATION_BUFFERS,
        "engine",
        "gradient copied to host memory",
        (elements,),
        options.compute,
        1,
        each,
        each,
        from_phase("optimizer"),
        f"{DTYPE_BYTES[options.compute]}·P_matrix",
        f"{SOURCE}stage_1_and_2.py: {name}",
    )
