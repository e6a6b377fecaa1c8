"""The rules of completions that a model generates to train on."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.rule_sets.violations import Violation, only
from memcalc.spec.spec import Spec


def rollouts(spec: Spec) -> Iterator[Violation]:
    """A completion follows a prompt; generation is that of one rank that has all weights."""
    training = spec.training
    if training.completion_length is None:
        if training.steps_per_generation is not None:
            yield Violation(
                ("training", "steps_per_generation"),
                f"steps_per_generation = {training.steps_per_generation} needs completion_length, without which "
                "nothing is generated.",
                "Set completion_length, or leave steps_per_generation out.",
            )
        return
    if training.completion_length >= training.sequence_length:
        yield Violation(
            ("training", "completion_length"),
            f"completion_length = {training.completion_length} leaves no prompt in sequence_length = "
            f"{training.sequence_length}.",
            "Raise sequence_length, which counts prompt and completion, or lower completion_length.",
        )
    if spec.model.full_attention is not None:
        yield Violation(
            ("training", "completion_length"),
            "generation of a model with separate heads in full attention is not modelled.",
            "Leave completion_length out, or dry-run the program: `memcalc dry-run --gpu GPU -- python script.py`.",
        )
    fields: dict[str, tuple[object, ...]] = {
        "training.implementation": ("plain", "huggingface"),
        "parallelism.zero_stage": (0, 1, 2),
        "parallelism.tensor_parallel": (1,),
        "parallelism.pipeline_parallel": (1,),
        "parallelism.context_parallel": (1,),
    }
    problem = f"{{}} is not modelled with completion_length = {training.completion_length}."
    yield from only(spec, fields, problem, "leave completion_length out")
