"""Evaluation between steps: a forward pass and its loss without gradients, of a batch of its own.

Autograd keeps nothing, so what each operator makes goes with the last one that reads it (torch 2.13
torch/csrc/autograd/functions/utils.h, compute_requires_grad). Modules are in evaluation mode: no dropout.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.estimation.blocks.structure import Structure, structure_of
from memcalc.estimation.engines.buffers import Around
from memcalc.estimation.items import EVALUATION, mask_of
from memcalc.estimation.moments import Highest
from memcalc.estimation.passes import beside, pieces_of
from memcalc.estimation.planned import PlannedTimeline
from memcalc.estimation.stages import Stage
from memcalc.estimation.symbols import symbol_values
from memcalc.estimation.timeline import Timeline
from memcalc.spec.cards import Card
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


def evaluation_moments(
    spec: Spec, stage: Stage, card: Card | None, around: Around
) -> Iterator[tuple[Timeline, list[tuple[Highest, int]]]]:
    """The highest moment of an evaluation, with the mask of its phase and the timeline that it is in."""
    if spec.training.evaluation_batch_size is None:
        return
    run, mask = evaluated(spec), mask_of(EVALUATION)
    values, surroundings = symbol_values(run, card), beside(run, around, exist=False)
    found: list[tuple[Timeline, Highest]] = []
    for piece in pieces_of(run, stage):
        of_piece = WithoutGradients(run, piece, values, *surroundings)
        found += [(of_piece, of_piece.highest(stream)) for stream in ("forward", "loss")]
    timeline, most = max(found, key=lambda each: each[1].bytes)
    yield timeline, [(most, mask)]
