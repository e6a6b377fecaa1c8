"""What the optimizer step depends on, apart from the parameters themselves."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.spec.optimizers import GALORE_RANK, momentum, nesterov, weight_decay
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.spec.training import TrainingSpec


class Update(NamedTuple):
    """One optimizer with the options that its memory depends on."""

    optimizer: str
    implementation: str
    decays: bool  # whether weight decay is added to the gradients or taken from the weights
    amsgrad: bool
    nesterov: bool
    centered: bool
    momentum: bool
    rank: int
    paged: bool
    embeddings_32bit: bool
    dtype: str  # of what is updated: masters, else the weights
    moments: str  # of torch's states
    family: str  # of transformers, whose modules' order the parameters are in; else nothing

    @property
    def item(self) -> int:
        """Bytes of an element of what is updated."""
        return DTYPE_BYTES[self.dtype]

    def of_weights(self, recipe: str, weights: str) -> Update:
        """The same update of weights of this dtype, which the recipe may keep masters of."""
        facts = RECIPES[recipe]
        moments = weights if facts.moments == "compute" else facts.moments
        return self._replace(dtype=facts.master or weights, moments=moments)


def update_of(training: TrainingSpec, weights: str, architecture: str | None) -> Update:
    """The update of a run, whose weights have this dtype."""
    name, options = training.optimizer, training.optimizer_options
    return Update(
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
        family=(architecture or "") if training.implementation == "huggingface" else "",
    ).of_weights(training.recipe, weights)
