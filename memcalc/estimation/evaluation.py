"""Evaluation between steps: a forward pass and its loss without gradients, of a batch of its own.

Autograd keeps nothing, so what each operator makes goes with the last one that reads it (torch 2.13
torch/csrc/autograd/functions/utils.h, compute_requires_grad). Modules are in evaluation mode: no dropout.
"""

from __future__ import annotations

from memcalc.estimation.blocks.structure import Structure, structure_of
from memcalc.estimation.engines.buffers import Around
from memcalc.estimation.passes import beside, pieces_of
from memcalc.estimation.planned import PlannedTimeline
from memcalc.estimation.sized import Sizer
from memcalc.estimation.stages import Stage
from memcalc.estimation.timeline import Timeline
from memcalc.spec.spec import Spec


def evaluated(spec: Spec) -> Spec:
    """The run whose forward pass and loss are those of an evaluation: its batch, nothing recomputed or offloaded.

    Liger's loss makes all logits where nothing trains (liger-kernel 0.8 transformers/model/llama.py, skip_logits).
    """
    training = spec.training
    assert training.evaluation_batch_size is not None
    changed = {
        "micro_batch_size": training.evaluation_batch_size,
        "gradient_accumulation_steps": 1,
        "recompute": "none",
        "recompute_keep": (),
        "offload_activations": "none",
        "loss": "materialized" if training.loss == "fused" else training.loss,
        "dropout": 0.0,
    }
    return spec.model_copy(update={"training": training.model_copy(update=changed)})


class WithoutGradients(Timeline):
    """The forward pass and the loss of one stage where autograd keeps nothing."""

    def structure(self) -> Structure:
        """The choices of the modules."""
        return without_gradients(structure_of(self.spec))


class PlannedWithoutGradients(PlannedTimeline):
    """The same, of which each layer has its turn."""

    def structure(self) -> Structure:
        """The choices of the modules."""
        return without_gradients(structure_of(self.spec))


def without_gradients(structure: Structure) -> Structure:
    """The choices of modules that run without gradients."""
    return structure._replace(evaluates=True, checkpoints_layers=False)


def evaluation_timelines(run: Spec, stage: Stage, sizer: Sizer, around: Around) -> list[WithoutGradients]:
    """The evaluation of each chunk of a stage.

    Args:
        run: as `evaluated` gives it.
        stage: the pipeline stage.
        sizer: of the run.
        around: the engine's buffers around the layers.
    """
    surroundings = beside(run, around, exist=False)
    return [WithoutGradients(run, piece, sizer, *surroundings) for piece in pieces_of(run, stage)]
