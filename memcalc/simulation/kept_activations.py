"""What a micro-batch in flight keeps on a chunk of a stage, as ledger rows."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.architectures.catalogue import GradientPolicy
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft
from memcalc.programs.sized_program import ProgramSizer
from memcalc.simulation.plans import plan_of
from memcalc.simulation.stage_blocks import StageBlocks, module_of
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states.pipelining import PASSES


def kept_activations(spec: Spec, chunk: Stage, sizer: ProgramSizer) -> Iterator[RowDraft]:
    """Yield what a micro-batch on a chunk keeps between forward and backward, in the passes of others.

    Args:
        spec: the run.
        chunk: the chunk.
        sizer: sizes of the run's blocks.
    """
    parts = StageBlocks(spec, chunk, sizer, GradientPolicy(kept=True, main_dtype=None), plan_of(spec, chunk))
    for number, count in parts.counts.items():
        block = parts.blocks[number]
        module = module_of(spec, chunk, block)
        for at in block.program.kept:
            if not block.sized.exact[at]:
                continue
            _, name, dtype, formula, citation = block.program.labels[at]
            kind = block.program.storages[at].component or Component.TEMPORARIES
            each, size = block.sized.exact[at], block.sized.sizes[at]
            shape = block.sized.shapes[at] or (each // DTYPE_BYTES[dtype],)
            yield RowDraft(kind, module, name, shape, dtype, count, each, size, PASSES, formula, citation)
