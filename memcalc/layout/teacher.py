"""The teacher of distillation: a frozen model that runs on each micro-batch; the student learns its logits."""

from __future__ import annotations

from memcalc.layout.spec_cache import cached_by_spec
from memcalc.layout.stages import Stage, stages_of
from memcalc.spec.finetuning import base_dtype
from memcalc.spec.spec import Spec

TEACHER = "teacher"  # before the names of its modules in rows


@cached_by_spec
def teacher_run(spec: Spec) -> Spec:
    """Return the run of the teacher: its forward pass on a micro-batch, with the student's implementation and engine.

    It is in evaluation mode, without dropout, and autograd saves nothing (torchtune 0.6.1
    recipes/knowledge_distillation_single_device.py, _setup_teacher_model and _loss_step).
    """
    training = spec.training
    assert training.teacher is not None
    held = training.teacher_dtype or base_dtype(training)
    wide = "amp" if training.autocasts else "fp32"
    changed = {
        "teacher": None,
        "finetune": "full",
        "lora": None,
        "qlora": None,
        "recipe": wide if held == "fp32" else "pure",
        "dtype": training.dtype if training.autocasts else held,
        "autocast": training.autocasts,
        "weight_dtype": held if training.autocasts and held not in ("fp32", training.dtype) else None,
        "gradient_accumulation_steps": 1,
        "global_batch_size": None,
        "recompute": "none",
        "recompute_keep": (),
        "offload_activations": "none",
        "optimizer_in_backward": False,
        "ema": "none",
        "dropout": 0.0,
        "evaluation_batch_size": None,
    }
    sizes = {"zero_optimization": spec.parallelism.zero_optimization.of_reference()}
    return spec.model_copy(
        update={
            "model": training.teacher,
            "training": training.model_copy(update=changed),
            "parallelism": spec.parallelism.model_copy(update=sizes),
        }
    )


def teacher_stage(spec: Spec) -> Stage:
    """Return the only stage of the teacher."""
    (stage,) = stages_of(teacher_run(spec))
    return stage
