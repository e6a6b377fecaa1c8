"""Evaluation between steps: a forward pass and its loss without gradients, with its own batch size.

Autograd saves nothing, so an operator's result is freed after its last reader (torch 2.13
torch/csrc/autograd/functions/utils.h, compute_requires_grad). Modules are in evaluation mode: no dropout.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.layout.stages import Stage
from memcalc.layout.teacher import TEACHER, teacher_run, teacher_stage
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
    return _without_training(spec, training.evaluation_batch_size)


def scored_by_reference(spec: Spec) -> bool:
    """Return whether a reference model scores a micro-batch between the policy's loss and its backward.

    TRL 1.16 trl/trainer/dpo_trainer.py, _compute_loss: without a second model the policy scores it, with its adapters
    disabled, which needs more than the policy's own loss only where all logits are live. GRPO scores its generated
    completions earlier.
    """
    training = spec.training
    itself = training.pairs and training.loss in ("selective", "gathered") and training.lora is not None
    return (training.reference_model or itself) and training.completion_length is None


def reference_run(spec: Spec) -> Spec:
    """Return the run with the reference model's forward pass and loss on a micro-batch."""
    sizes = {"zero_optimization": spec.parallelism.zero_optimization.of_reference()}
    until = {"logits_until": spec.training.reference_logits_until}
    changes = {
        "parallelism": spec.parallelism.model_copy(update=sizes),
        "training": spec.training.model_copy(update=until),
    }
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
    return spec.model_copy(update={"training": training.model_copy(update=changed)})
