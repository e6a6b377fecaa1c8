"""Evaluation between steps: a forward pass and its loss without gradients, with its own batch size.

Autograd saves nothing, so an operator's result is freed after its last reader (torch 2.13
torch/csrc/autograd/functions/utils.h, compute_requires_grad). Modules are in evaluation mode: no dropout.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.layout.stages import Stage
from memcalc.layout.teacher import TEACHER, teacher_run, teacher_stage
from memcalc.spec.scoring import scored_by_reference
from memcalc.spec.spec import Spec


def evaluates_between_steps(spec: Spec) -> bool:
    """Return whether an evaluation runs between steps."""
    return spec.training.evaluation_batch_size is not None and spec.training.evaluation_when != "before"


def evaluated(spec: Spec) -> Spec:
    """Return the run with the batch of its evaluation, without recomputation or offload.

    Liger's loss materializes all logits without training (liger-kernel 0.8 transformers/model/llama.py, skip_logits).
    """
    training = spec.training
    assert training.evaluation_batch_size is not None
    run = spec.with_training(teacher=None)  # a limit of the estimate
    return _without_training(run, training.evaluation_batch_size)


def reference_run(spec: Spec) -> Spec:
    """Return the run with the reference's forward pass and loss on a micro-batch; a second model has its own engine."""
    until = {"logits_until": spec.training.reference_logits_until}
    changes: dict[str, object] = {"training": spec.training.model_copy(update=until)}
    if spec.training.reference_model:
        sizes = {"zero_optimization": spec.parallelism.zero_optimization.of_reference()}
        changes["parallelism"] = spec.parallelism.model_copy(update=sizes)
    return _without_training(spec.model_copy(update=changes), spec.training.micro_batch_size)


class FrozenModel(NamedTuple):
    """A frozen model that runs on each micro-batch in addition to the one that trains.

    Args:
        run: its forward pass, and its loss if it has one.
        chunk: its layers.
        name: before the names of its modules in rows; "": as those of the model that trains.
    """

    run: Spec
    chunk: Stage
    name: str = ""


def frozen_model(spec: Spec, chunk: Stage) -> FrozenModel | None:
    """Return the teacher, which runs before the loss, or what scores the micro-batch after it; None without either.

    Args:
        spec: the run.
        chunk: the chunk of the model that trains.
    """
    if spec.training.teacher is not None:
        return FrozenModel(teacher_run(spec), teacher_stage(spec), f"{TEACHER}.")
    return FrozenModel(reference_run(spec), chunk) if scored_by_reference(spec) else None


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
    return spec.with_training(**changed)
