"""Features of a run's program that memcalc's own traced or measured step lacks."""

from __future__ import annotations

from memcalc.spec.limits import Limit
from memcalc.spec.spec import Spec
from memcalc.spec.towers import tower_trains


def not_run(spec: Spec) -> tuple[Limit, ...]:
    """Return requested features that memcalc's own step does not run; a dry run of the program does."""
    training = spec.training
    asked = {
        "the second sequence of each pair": training.pairs,
        "the reference model": training.reference_model,
        "the teacher, its logits and the divergence from them": training.teacher is not None,
        "evaluation during training": training.evaluation_batch_size is not None,
        "completions that the model generates": training.completion_length is not None,
        "padding-free batches": training.padding_free,
        "the mask of padded sequences": training.padding_mask != "none",
        "torch.compile": training.compile,
        "axolotl's functions of several adapters": training.lora is not None and bool(training.lora.fused),
        "logits that are shifted": training.loss_shift != "labels",
        # a `Spec` has the formulas' fields of the language model, from which a step of text is built
        "images: activations, gradients and optimizer state of the vision tower": tower_trains(spec.model, training),
    }
    found = tuple(Limit(what, holds_memory=True) for what, is_so in asked.items() if is_so)
    if training.empty_cache_steps is None:
        return found
    return (*found, Limit("torch.cuda.empty_cache(), after which less is reserved", holds_memory=False))
