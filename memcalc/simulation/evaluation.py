"""Evaluation between steps: a forward pass and its loss without gradients, with its own batch size.

Autograd saves nothing, so an operator's result is freed after its last reader (torch 2.13
torch/csrc/autograd/functions/utils.h, compute_requires_grad). Modules are in evaluation mode: no dropout.
"""

from __future__ import annotations

from memcalc.architectures.structure import BlockStructure, block_structure
from memcalc.layout.stages import Stage
from memcalc.ledger.row_drafts import RowDraft
from memcalc.phase_peaks.layer_buffers import PerLayerBuffers
from memcalc.phase_peaks.passes import beside, pieces_of
from memcalc.phase_peaks.recompute_timeline import RecomputeTimeline
from memcalc.phase_peaks.timeline import StageTimeline
from memcalc.programs.sized_program import ProgramSizer
from memcalc.spec.spec import Spec


def evaluated(spec: Spec) -> Spec:
    """Return the run with the batch of its evaluation, without recomputation or offload.

    Liger's loss materializes all logits without training (liger-kernel 0.8 transformers/model/llama.py, skip_logits).
    """
    training = spec.training
    assert training.evaluation_batch_size is not None
    return _without_training(spec, training.evaluation_batch_size)


def scored_by_reference(spec: Spec) -> bool:
    """Whether a reference model scores a micro-batch when the policy's loss is there, before backward.

    TRL 1.16 trl/trainer/dpo_trainer.py, _compute_loss. With its own completions (GRPO) it has scored them before.
    """
    return spec.training.reference_model and spec.training.completion_length is None


def reference_run(spec: Spec) -> Spec:
    """Return the run with the reference model's forward pass and loss on a micro-batch."""
    return _without_training(spec, spec.training.micro_batch_size)


def _without_training(spec: Spec, batch: int) -> Spec:
    training = spec.training
    whole = training.evaluation_loss == "whole"
    changed = {
        "micro_batch_size": batch,
        "gradient_accumulation_steps": 1,
        "recompute": "none",
        "recompute_keep": (),
        "offload_activations": "none",
        "loss": "materialized" if whole or training.loss == "fused" else training.loss,
        "loss_shift": "logits" if whole else training.loss_shift,
        "dropout": 0.0,
    }
    return spec.model_copy(update={"training": training.model_copy(update=changed)})


class ForwardOnlyTimeline(StageTimeline):
    """Forward pass and loss of one stage without autograd."""

    def structure(self) -> BlockStructure:
        """Return the options of the modules."""
        return without_gradients(block_structure(self.spec))


class ForwardOnlyRecomputeTimeline(RecomputeTimeline):
    """Forward pass and loss of one stage without autograd, simulated layer by layer."""

    def structure(self) -> BlockStructure:
        """Return the options of the modules."""
        return without_gradients(block_structure(self.spec))


def without_gradients(structure: BlockStructure) -> BlockStructure:
    """Return the options of modules that run without gradients."""
    return structure._replace(evaluates=True, checkpoints_layers=False)


def reference_items(
    run: Spec, stage: Stage, sizer: ProgramSizer, layer_buffers: PerLayerBuffers
) -> tuple[tuple[RowDraft, int], ...]:
    """Return the live tensors at the peak of the reference model's forward.

    Args:
        run: as `reference_run` gives it.
        stage: the pipeline stage.
        sizer: of the run.
        layer_buffers: the engine's buffers around the layers.
    """
    (timeline,) = evaluation_timelines(run, stage, sizer, layer_buffers)
    moments = [timeline.highest(stream) for stream in ("forward", "loss")]
    highest = max(moments, key=lambda each: each.bytes)
    return tuple((item, item.count) for item in timeline.items([(highest, 0)]))


def evaluation_timelines(
    run: Spec, stage: Stage, sizer: ProgramSizer, layer_buffers: PerLayerBuffers
) -> list[ForwardOnlyTimeline]:
    """Return the timeline of the evaluation for each chunk of a stage.

    Args:
        run: the evaluation, from `evaluated`.
        stage: the pipeline stage.
        sizer: sizes of the run's blocks.
        layer_buffers: the engine's per-layer buffers.
    """
    surroundings = beside(run, layer_buffers, exist=False)
    return [ForwardOnlyTimeline(run, piece, sizer, *surroundings) for piece in pieces_of(run, stage)]
