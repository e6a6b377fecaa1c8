"""Update rule: the optimizer options that the step's memory depends on."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.spec.optimizers import GALORE_RANK, momentum, nesterov, weight_decay
from memcalc.spec.recipes import RECIPES
from memcalc.spec.training import TrainingSpec
from memcalc.states.optimizers.parameter_order import MEGATRON, TORCHTITAN


class UpdateRule(NamedTuple):
    """An optimizer and the options that its memory depends on."""

    optimizer: str  # its name
    implementation: str  # foreach, fused or for-loop
    decays: bool  # whether weight decay is added to the gradients instead of changing the weights
    amsgrad: bool  # whether it keeps the maximum of second moments
    nesterov: bool  # whether it uses Nesterov momentum
    centered: bool  # whether it keeps the mean gradient
    momentum: bool  # whether its momentum is above 0
    rank: int  # GaLore's rank
    paged: bool  # whether states are in unified memory
    embeddings_32bit: bool  # whether the states of embeddings stay in fp32
    dtype: str  # dtype of the updated tensors: the master weights, else the weights
    moments: str  # dtype of torch's states
    family: str  # the transformers family that sets the order of parameters, TORCHTITAN or MEGATRON; else ""

    def of_weights(self, recipe: str, weights: str) -> UpdateRule:
        """Return the same update for weights of this dtype, for which the recipe may keep master weights."""
        facts = RECIPES[recipe]
        moments = weights if facts.moments == "compute" else facts.moments
        return self._replace(dtype=facts.master or weights, moments=moments)


def update_of(training: TrainingSpec, weights: str, architecture: str | None) -> UpdateRule:
    """Return the update rule of a run with weights of this dtype."""
    name, options = training.optimizer, training.optimizer_options
    families = {"huggingface": architecture or "", "torchtitan": TORCHTITAN, "megatron": MEGATRON}
    return UpdateRule(
        optimizer=name,
        implementation=training.optimizer_implementation,
        decays=weight_decay(name, options) > 0,
        amsgrad=options.amsgrad,
        nesterov=nesterov(name, options),
        centered=options.centered,
        momentum=momentum(name, options) > 0,
        rank=options.rank or GALORE_RANK,
        paged=options.paged,
        embeddings_32bit=options.embeddings_32bit,
        dtype=weights,
        moments=weights,
        family=families.get(training.implementation, ""),
    ).of_weights(training.recipe, weights)
