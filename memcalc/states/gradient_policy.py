"""Handling of a parameter's gradient after it is produced: stored, added or copied."""

from __future__ import annotations

from memcalc.architectures.catalogue import GradientPolicy
from memcalc.layout.adapters import read_dtype
from memcalc.spec.recipes import RECIPES
from memcalc.spec.spec import Spec
from memcalc.states.optimizers.step_temporaries import update_of_one
from memcalc.states.state_options import state_options


def _adds_in_place(spec: Spec) -> bool:
    """Return whether autograd adds to the unsharded gradients of earlier micro-batches, which FSDP2 has not reduced.

    Gradients reduced in another dtype are accumulated in a separate tensor of that dtype (torch 2.13 _fsdp_param.py,
    to_accumulated_grad...).
    """
    fsdp = spec.parallelism.fsdp
    if spec.parallelism.engine == "fsdp1":  # autograd concatenates the gradients of a unit before it adds them
        return False
    return spec.parallelism.reduces_once and fsdp.reduce_dtype in (None, read_dtype(spec))


def embedding_gradient_stays(spec: Spec) -> bool:
    """Return whether the embedding's gradient outlives zero_grad, and each backward adds to it.

    LitGPT 0.5.13 finetune/lora.py, main: with a 4-bit base the embedding is replaced after the optimizer is made.
    """
    return spec.training.framework == "litgpt" and spec.training.finetune == "qlora"


def gradient_policy(spec: Spec, *, exist: bool, sharded: bool) -> GradientPolicy:
    """Return whether a produced gradient is stored or added to an existing one, and whether an fp32 copy is made.

    Args:
        spec: the run.
        exist: whether the gradient of an earlier micro-batch or step still exists.
        sharded: whether gradients are sharded. They are then unsharded until their layer's backward has finished, and
            copies are made of the shard.
    """
    if sharded and exist and _adds_in_place(spec):
        return GradientPolicy(kept=False, main_dtype=None)
    if sharded:
        # DeepSpeed's stage 2 copies each gradient into its bucket and frees it at once; FSDP2 waits for the whole
        # layer.
        return GradientPolicy(kept=spec.parallelism.engine != "deepspeed", main_dtype=None)
    if spec.training.optimizer_in_backward:
        update = state_options(spec).update
        return GradientPolicy(kept=False, main_dtype=None, update=update_of_one(update))
    recipe = RECIPES[spec.training.recipe]
    if exist or recipe.gradients is None:
        return GradientPolicy(kept=False, main_dtype=None)
    summed = recipe.main_gradients_live == "backward" and not state_options(spec).sums_apart
    main = recipe.main_gradients if summed else None
    return GradientPolicy(kept=True, main_dtype=main)
