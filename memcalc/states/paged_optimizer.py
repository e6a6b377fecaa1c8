"""Host memory of paged optimizers.

bitsandbytes 0.50 functional.py, get_paged: states are in CUDA unified memory, which PyTorch's allocator does not
track. Unified memory moves to the host when the GPU runs short, so the host needs room for all of it. Pages on the
GPU come on top of PyTorch's memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.stages import Stage, stages_of
from memcalc.spec.spec import Spec
from memcalc.states.optimizers.optimizer_states import optimizer_states
from memcalc.states.state_options import groups, state_options
from memcalc.units import format_bytes


def paged_bytes(spec: Spec, stage: Stage) -> int:
    """Return the bytes of optimizer states in unified memory on one rank of a stage; 0 without a paged optimizer."""
    return sum(
        state.item.each * state.item.count
        for group, own, trains in groups(stage_parameters(spec, stage), state_options(spec))
        if trains
        for state in optimizer_states(group, own.update, own.spread(1))
        if state.paged
    )


def paging_notes(spec: Spec) -> Iterator[str]:
    """Yield a note on the host memory that a rank needs for paged states."""
    if spec.training.optimizer_options.paged:
        most = max(paged_bytes(spec, stage) for stage in stages_of(spec))
        yield (
            f"Host memory: {format_bytes(most)} ({most:,} bytes) per rank for paged optimizer states, which are in "
            "unified memory (bitsandbytes) and not in these figures."
        )
