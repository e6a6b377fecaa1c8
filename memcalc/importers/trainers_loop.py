"""What Hugging Face's Trainer does around a model, which plain loops do not (transformers 5.23, trainer.py)."""

from __future__ import annotations

from collections.abc import Mapping

from memcalc.importers.switches import is_on
from memcalc.importers.table import Draft

MAX_GRAD_NORM = 1.0  # training_args.py: what silence means
LIGERS = "Liger's loss never has all logits: loss fused; its norms, rotary positions and MLPs keep less than estimated"


def place_trainers_loop(draft: Draft) -> None:
    """The loss, the logits, clipping, and what bitsandbytes leaves in 32 bits, from what the file says.

    compute_loss returns the loss alone, so the logits are gone before backward. create_optimizer has bitsandbytes keep
    the states of embeddings in 32 bits. Gradients are clipped to `max_grad_norm`, unless that is 0.
    """
    facts, values = draft.facts, draft.values
    draft.default("training.logits_until", "loss")
    clipping = facts.get("clipping", MAX_GRAD_NORM)
    if clipping:
        draft.default("training.gradient_clipping", clipping)
    masters = str(values.get("training.recipe", "")).startswith("mixed")  # which bitsandbytes does not know
    if values.get("training.optimizer") in ("adam-8bit", "lion-8bit") and not masters:
        draft.default("training.optimizer_options.embeddings_32bit", True)
    config = facts.get("liger_config")
    config = config if isinstance(config, Mapping) else {}
    if is_on(facts.get("liger")) and config.get("fused_linear_cross_entropy", True):
        draft.default("training.loss", "fused")
        draft.notes.append(LIGERS)
    if is_on(facts.get("cut_cross_entropy")):
        draft.default("training.loss", "fused")
        draft.notes.append("cut cross-entropy is counted as Liger's fused loss, which has some logits at a time")
