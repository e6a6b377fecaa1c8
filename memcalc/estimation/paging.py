"""Host memory of paged optimizers.

bitsandbytes 0.50 functional.py, get_paged: states in CUDA's unified memory, which PyTorch's allocator does not know of.
It moves to the host when the GPU runs short, so the host must have room for all of it, and what is on the GPU is there
beside PyTorch's memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.estimation.choice import choice_of, groups
from memcalc.estimation.optimizers.states import optimizer_states
from memcalc.estimation.sharding import stage_parameters
from memcalc.estimation.stages import Stage, stages_of
from memcalc.spec.spec import Spec
from memcalc.units import format_bytes


def paged_bytes(spec: Spec, stage: Stage) -> int:
    """Bytes of the states that one rank of a stage has in unified memory; 0 without a paged optimizer."""
    return sum(
        state.item.each * state.item.count
        for group, own, trains in groups(stage_parameters(spec, stage), choice_of(spec))
        if trains
        for state in optimizer_states(group, own.update, own.spread(1))
        if state.paged
    )


def paging_notes(spec: Spec) -> Iterator[str]:
    """How much host memory a rank needs for them."""
    if spec.training.optimizer_options.paged:
        most = max(paged_bytes(spec, stage) for stage in stages_of(spec))
        yield (
            f"Host memory: {format_bytes(most)} ({most:,} bytes) a rank for paged optimizer states, which are unified "
            f"memory (bitsandbytes) and in no figure here."
        )
