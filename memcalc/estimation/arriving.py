"""What becomes of a gradient when it arrives."""

from __future__ import annotations

from memcalc.estimation.adapters import read_dtype
from memcalc.estimation.blocks.catalogue import Gradients
from memcalc.spec.recipes import RECIPES
from memcalc.spec.spec import Spec


def _adds_in_place(spec: Spec) -> bool:
    """Whether autograd adds to the unsharded gradients of earlier micro-batches, which FSDP2 has not reduced.

    It puts those that it reduces in another dtype aside in that (torch 2.13 _fsdp_param.py, to_accumulated_grad...).
    """
    fsdp = spec.parallelism.fsdp
    return fsdp.gradient_sync == "last" and fsdp.reduce_dtype in (None, read_dtype(spec))


def gradients_on_arrival(spec: Spec, *, exist: bool, sharded: bool) -> Gradients:
    """What becomes of a gradient: kept, or added to one that exists; with a second copy in fp32, or without.

    Sharded gradients are whole until their layer's backward has passed; copies are made of the share.
    """
    if sharded and exist and _adds_in_place(spec):
        return Gradients(kept=False, main_dtype=None)
    if sharded:
        # DeepSpeed's stage 2 copies each into its bucket and frees it at once; FSDP2 waits for the whole layer.
        return Gradients(kept=spec.parallelism.engine != "deepspeed", main_dtype=None)
    recipe = RECIPES[spec.training.recipe]
    if exist or recipe.gradients is None:
        return Gradients(kept=False, main_dtype=None)
    main = recipe.main_gradients if recipe.main_gradients_live == "backward" else None
    return Gradients(kept=True, main_dtype=main)
