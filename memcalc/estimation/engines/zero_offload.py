"""What ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity (arXiv 2104.07857) have on the host, as DeepSpeed 0.19 does.

runtime/zero/stage_1_and_2.py and stage3.py with offload_optimizer.device = cpu: fp32 masters, their gradients and the
states of the update are tensors of the CPU. Each reduced gradient is copied there as it arrives; the step runs there;
what it has updated comes back as the device's 16-bit weights. With offload_param.device = cpu these are the host's, in
one piece, and a rank's share of each is copied to the device as it is gathered.
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
    """Weights, and masters, gradients and states, of parameters that are held alike."""
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
    """The weights among what is on the host: one tensor, which is pinned whatever pin_memory says (stage3.py)."""
    weights = [item for item in items if item.component is Component.WEIGHTS]
    each = sum(item.each * item.count for item in weights)
    return [item._replace(each=each, count=1) for item in weights[:1]]


def _copies(choice: Choice) -> Iterator[Copy]:
    """The masters, and their gradients in fp32, which are there from the beginning."""
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
    """Stage 2 passes gradients through a pinned buffer as large as the largest parameter."""
    if choice.zero_stage < 3:
        yield gradient_passage(parameters, choice, "temp_grad_buffer_for_cpu_offload")


def gradient_passage(parameters: Parameters, choice: Choice, name: str) -> Item:
    """The buffer, one on the device and one on the host, that gradients pass through on their way."""
    elements = max(held.elements for held in parameters)
    each = elements * DTYPE_BYTES[choice.compute]
    return Item(
        Component.COMMUNICATION_BUFFERS,
        "engine",
        "gradient on its way to the host",
        (elements,),
        choice.compute,
        1,
        each,
        each,
        from_phase("optimizer"),
        f"{DTYPE_BYTES[choice.compute]}·P_matrix",
        f"{SOURCE}stage_1_and_2.py: {name}",
    )
