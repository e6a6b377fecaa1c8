"""Host memory of ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity (arXiv 2104.07857), as in DeepSpeed 0.19.

runtime/zero/stage_1_and_2.py and stage3.py with offload_optimizer.device = cpu: fp32 master weights, their gradients
and the optimizer states are CPU tensors. Each reduced gradient is copied to the CPU, where the step runs; updated
weights are copied back in bf16 or fp16. With offload_param.device = cpu the weights are one tensor in host memory; a
rank's shard of each is copied to the device when it is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memcalc.estimation.choice import Choice
from memcalc.estimation.copies import Copy, copy_item
from memcalc.estimation.items import Item, from_phase
from memcalc.estimation.optimizers.states import optimizer_states
from memcalc.estimation.recipe_copies import kept_copies
from memcalc.estimation.sharding import Parameters
from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES

SOURCE = "DeepSpeed 0.19 runtime/zero/"


def held(parameters: Parameters, choice: Choice, *, trains: bool) -> Iterator[Item]:
    """Yield weights, master weights, gradients and states in host memory, for parameters with identical options."""
    if choice.weights_on_host:
        weights = next(copy for copy in kept_copies(choice, trains=False) if copy.component is Component.WEIGHTS)
        weights = weights._replace(citation=f"{SOURCE}stage3.py: _create_param_groups_fp16_flat_cpu_memory")
        yield from (copy_item(weights, each, choice.spread(3)) for each in parameters)
    if not choice.offloads or not trains:
        return
    for copy in _copies(choice):
        yield from (copy_item(copy, each, choice.spread(copy.sharded_from_stage)) for each in parameters)
    yield from (state.item for state in optimizer_states(parameters, choice.update, choice.spread(1)))


def in_one_piece(items: Iterable[Item]) -> list[Item]:
    """Return the weights among host tensors: one tensor, pinned regardless of pin_memory (stage3.py)."""
    weights = [item for item in items if item.component is Component.WEIGHTS]
    each = sum(item.each * item.count for item in weights)
    return [item._replace(each=each, count=1) for item in weights[:1]]


def _copies(choice: Choice) -> Iterator[Copy]:
    """Yield the fp32 master weights and their fp32 gradients, which exist from the start."""
    yield from (copy for copy in kept_copies(choice, trains=True) if copy.component is Component.MASTER_WEIGHTS)
    whole = from_phase("optimizer")
    citation = f"{SOURCE}: the gradients of the fp32 masters, pinned"
    yield Copy(Component.GRADIENTS, " gradient in fp32", "fp32", 1, whole, citation)
    if choice.zero_stage == 3:
        citation = f"{SOURCE}stage3.py: grad_partitions_flat_buffer"
        yield Copy(Component.GRADIENTS, " gradient", choice.base, 1, whole, citation)
    elif choice.accumulates:
        citation = f"{SOURCE}stage_1_and_2.py: accumulated_grads_in_cpu"
        yield Copy(Component.GRADIENTS, " gradient, accumulated", choice.base, 1, whole, citation)


def buffers(parameters: Parameters, choice: Choice) -> Iterator[Item]:
    """Yield the pinned buffer, as large as the largest parameter, through which stage 2 copies gradients."""
    if choice.zero_stage < 3:
        yield gradient_passage(parameters, choice, "temp_grad_buffer_for_cpu_offload")


def gradient_passage(parameters: Parameters, choice: Choice, name: str) -> Item:
    """Return the buffer, one on the device and one in host memory, through which gradients are copied to the host."""
    elements = max(held.elements for held in parameters)
    each = elements * DTYPE_BYTES[choice.compute]
    return Item(
        Component.COMMUNICATION_BUFFERS,
        "engine",
        "gradient copied to host memory",
        (elements,),
        choice.compute,
        1,
        each,
        each,
        from_phase("optimizer"),
        f"{DTYPE_BYTES[choice.compute]}·P_matrix",
        f"{SOURCE}stage_1_and_2.py: {name}",
    )
