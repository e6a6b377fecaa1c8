"""Host (CPU) memory of a rank with offload: DeepSpeed's ZeRO-Offload or FSDP2's CPUOffloadPolicy.

The CPU allocator does not round to 512 bytes: bytes are as requested, except for pinned memory
(memcalc/workspaces/pinned.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from memcalc.architectures.catalogue import GradientPolicy
from memcalc.layout.local_parameters import LocalParameters, stage_parameters
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Rows
from memcalc.ledger.row_drafts import STEPS, RowDraft, mask_of
from memcalc.ledger.row_writer import write_rows
from memcalc.programs.sized_program import run_sizer
from memcalc.simulation.plans import plan_of
from memcalc.simulation.stage_blocks import StageBlocks, module_of
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states import fsdp2_cpu_offload, zero_offload
from memcalc.states.state_options import StateOptions, groups, state_options
from memcalc.workspaces.pinned import SOURCE, pinned_block


def host_rows(spec: Spec, stage: Stage) -> Rows | None:
    """Return the host memory of one rank of a stage as rows; None without offload."""
    options = state_options(spec)
    if spec.training.offload_activations != "none":
        return activation_rows(spec, stage)
    uses_host = options.host.offloads or options.host.has_weights
    return _host_rows(stage_parameters(spec, stage), options) if uses_host else None


@lru_cache(maxsize=1024)
def _host_rows(parameters: LocalParameters, options: StateOptions) -> Rows:
    pinned: list[RowDraft] = []
    pageable: list[RowDraft] = []
    for group, own, trains in groups(parameters, options):
        if own.engine == "fsdp2":
            locked, others = fsdp2_cpu_offload.offloaded_states(group, own, trains=trains)
            pinned += locked
            pageable += others
        else:
            pageable += zero_offload.offloaded_states(group, own, trains=trains)
    blocks = pinned
    if options.engine == "deepspeed":
        pageable += zero_offload.buffers(parameters, options)
        blocks = zero_offload.in_one_tensor(pageable)
    items = [*pinned, *pageable, *_rounding(blocks)]
    return Rows(write_rows([item._replace(block=item.each) for item in items], "the host"))


def activation_rows(spec: Spec, stage: Stage) -> Rows:
    """Return the activations saved in host memory, from forward until their backward; most at the end of forward."""
    plan, policy = plan_of(spec, stage), GradientPolicy(kept=True, main_dtype=None)
    parts = StageBlocks(spec, stage, run_sizer(spec, None), policy, plan)
    phases = mask_of(*(f"{phase}_{step}" for phase in ("forward", "loss", "backward") for step in range(1, STEPS + 1)))
    items = []
    for number, count in parts.counts.items():
        block = parts.blocks[number]
        kind = Component.LOGITS_AND_LOSS if block.part == "head" else Component.ACTIVATIONS
        module = module_of(spec, stage, block)
        for index in block.program.packed:
            _, name, dtype, formula, citation = block.program.labels[index]
            each = block.sized.exact[index]
            shape = block.sized.shapes[index] or (each // DTYPE_BYTES[dtype],)
            items.append(RowDraft(kind, module, name, shape, dtype, count, each, each, phases, formula, citation))
    rounding = _rounding(items) if spec.training.offload_activations == "pinned" else ()
    return Rows(write_rows([*items, *rounding], "the host"))


def _rounding(pinned: Iterable[RowDraft]) -> Iterator[RowDraft]:
    """Yield the bytes that pinned memory adds by rounding blocks to powers of two."""
    amounts: dict[int, int] = {}
    for item in pinned:
        more = item.count * (pinned_block(item.each) - item.each)
        amounts[item.mask] = amounts.get(item.mask, 0) + more
    for mask, amount in amounts.items():
        name, formula = "rounding of pinned memory", "blocks of a power of two"
        kind = Component.BLOCK_ROUNDING
        yield RowDraft(kind, "allocator", name, (amount,), "uint8", 1, amount, amount, mask, formula, SOURCE)
