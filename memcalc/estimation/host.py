"""Host (CPU) memory of a rank with offload: DeepSpeed's ZeRO-Offload or FSDP2's CPUOffloadPolicy.

The CPU allocator does not round to 512 bytes: bytes are as requested, except for pinned memory
(memcalc/workspaces/pinned.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from memcalc.estimation.blocks.catalogue import Gradients
from memcalc.estimation.choice import Choice, choice_of, groups
from memcalc.estimation.copies import Copy
from memcalc.estimation.engines import fsdp2_host, zero_offload
from memcalc.estimation.engines.buffers import Around
from memcalc.estimation.items import STEPS, Item, mask_of
from memcalc.estimation.rows import write_rows
from memcalc.estimation.sharding import Parameters, stage_parameters
from memcalc.estimation.sized import run_sizer
from memcalc.estimation.stages import Stage
from memcalc.estimation.timeline import Timeline
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Rows
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.workspaces.pinned import SOURCE, pinned_block


def is_on_host(copy: Copy, choice: Choice) -> bool:
    """Return whether a copy of the parameters is in host memory: the optimizer's copies, the weights, or all."""
    if copy.component is Component.WEIGHTS:
        return choice.weights_on_host
    updated = (Component.MASTER_WEIGHTS, Component.GRADIENTS)
    return choice.offloads and (choice.weights_on_host or copy.component in updated)


def host_rows(spec: Spec, stage: Stage) -> Rows | None:
    """Return the host memory of one rank of a stage as rows; None without offload."""
    choice = choice_of(spec)
    if spec.training.offload_activations != "none":
        return activation_rows(spec, stage)
    return _host_rows(stage_parameters(spec, stage), choice) if choice.offloads or choice.weights_on_host else None


@lru_cache(maxsize=1024)
def _host_rows(parameters: Parameters, choice: Choice) -> Rows:
    pinned: list[Item] = []
    pageable: list[Item] = []
    for group, own, trains in groups(parameters, choice):
        if own.engine == "fsdp2":
            locked, others = fsdp2_host.held(group, own, trains=trains)
            pinned += locked
            pageable += others
        else:
            pageable += zero_offload.held(group, own, trains=trains)
    blocks = pinned
    if choice.engine == "deepspeed":
        pageable += zero_offload.buffers(parameters, choice)
        blocks = zero_offload.in_one_piece(pageable)
    items = [*pinned, *pageable, *_rounding(blocks)]
    return write_rows([item._replace(block=item.each) for item in items], "the host")


def activation_rows(spec: Spec, stage: Stage) -> Rows:
    """Return the activations saved in host memory, from forward until their backward; most at the end of forward."""
    timeline = Timeline(spec, stage, run_sizer(spec, None), Gradients(kept=True, main_dtype=None), Around())
    phases = mask_of(*(f"{phase}_{step}" for phase in ("forward", "loss", "backward") for step in range(1, STEPS + 1)))
    items = []
    for block in timeline.blocks:
        count = 1 if block.kind is None else block.kind.count
        kind = Component.LOGITS_AND_LOSS if block.part == "head" else Component.ACTIVATIONS
        for index in block.program.packed:
            _, name, dtype, formula, citation = block.program.labels[index]
            each = block.sized.exact[index]
            shape = block.sized.shapes[index] or (each // DTYPE_BYTES[dtype],)
            items.append(Item(kind, block.name, name, shape, dtype, count, each, each, phases, formula, citation))
    rounding = _rounding(items) if spec.training.offload_activations == "pinned" else ()
    return write_rows([*items, *rounding], "the host")


def _rounding(pinned: Iterable[Item]) -> Iterator[Item]:
    """Yield the bytes that pinned memory adds by rounding blocks to powers of two."""
    amounts: dict[int, int] = {}
    for item in pinned:
        more = item.count * (pinned_block(item.each) - item.each)
        amounts[item.mask] = amounts.get(item.mask, 0) + more
    for mask, amount in amounts.items():
        name, formula = "rounding of pinned memory", "blocks of a power of two"
        kind = Component.BLOCK_ROUNDING
        yield Item(kind, "allocator", name, (amount,), "uint8", 1, amount, amount, mask, formula, SOURCE)
