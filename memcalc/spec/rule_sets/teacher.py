"""The rules of a run with a teacher."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.rule_sets.violations import Violation, only
from memcalc.spec.spec import Spec
from memcalc.spec.training import TOKENWISE


def teacher(spec: Spec) -> Iterator[Violation]:
    """A teacher runs whole on each rank, or sharded as the student is, and both return all logits."""
    training, model = spec.training, spec.model
    if training.teacher is None:
        if training.teacher_dtype is not None:
            yield Violation(
                ("training", "teacher_dtype"),
                f"teacher_dtype = {training.teacher_dtype} needs a teacher.",
                "Set teacher, or leave teacher_dtype out.",
            )
        if training.divergence != "forward":
            yield Violation(
                ("training", "divergence"),
                f"divergence = {training.divergence} needs a teacher.",
                "Set teacher, or leave divergence out.",
            )
        return
    if training.teacher.vocab_size != model.vocab_size:
        yield Violation(
            ("training", "teacher"),
            f"the teacher's vocab_size = {training.teacher.vocab_size} differs from the model's {model.vocab_size}, "
            "but the logits of both are compared.",
            "Choose a teacher with the same vocabulary.",
        )
    if training.loss in TOKENWISE and training.loss_recompute:
        yield Violation(
            ("training", "loss"),
            f"loss = {training.loss} returns no logits, which a teacher is compared with.",
            "Set loss: materialized, or loss: chunked with loss_recompute: false and chunked_head: true.",
        )
    fields: dict[str, tuple[object, ...]] = {
        "training.implementation": ("plain", "huggingface"),
        "training.chunked_head": (True,),
        "training.pairs": (False,),
        "training.reference_model": (False,),
        "training.completion_length": (None,),
        "training.loss_shift": ("labels",),
        "model.num_labels": (0,),
        "parallelism.tensor_parallel": (1,),
        "parallelism.pipeline_parallel": (1,),
        "parallelism.context_parallel": (1,),
        "parallelism.expert_parallel": (1,),
    }
    yield from only(spec, fields, "{} is not modelled with a teacher.", "leave teacher out")
