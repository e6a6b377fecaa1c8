"""What becomes of a gradient when it arrives."""

from __future__ import annotations

from memcalc.estimation.blocks.catalogue import Gradients
from memcalc.spec.recipes import RECIPES
from memcalc.spec.spec import Spec


def gradients_on_arrival(spec: Spec, *, exist: bool, sharded: bool) -> Gradients:
    """What becomes of a gradient: kept, or added to one that exists; with a second copy in fp32, or without.

    Sharded gradients are whole until their layer's backward has passed; copies are made of the share.
    """
    if sharded:
        # DeepSpeed's stage 2 copies each into its bucket and frees it at once; FSDP2 waits for the whole layer.
        return Gradients(kept=spec.parallelism.engine != "deepspeed", main_dtype=None)
    recipe = RECIPES[spec.training.recipe]
    if exist or recipe.gradients is None:
        return Gradients(kept=False, main_dtype=None)
    main = recipe.main_gradients if recipe.main_gradients_live == "backward" else None
    return Gradients(kept=True, main_dtype=main)
