"""Fields that only the training script around Accelerate or DeepSpeed decides."""

from __future__ import annotations

from memcalc.frameworks.draft import Draft

FIELD = "training.logits_until"
STEP = "training.optimizer_implementation"


def place_outputs(draft: Draft) -> None:
    """Set whether the script keeps the model's outputs through backward.

    `outputs = model(**batch)` does; `loss = model(**batch).loss` frees all but the loss.
    """
    what = "whether the script keeps the model's outputs through backward (`outputs = model(...)`)"
    draft.default(FIELD, draft.choose(FIELD, what, ("backward", "loss")))


def place_optimizer_step(draft: Draft) -> None:
    """Set the implementation of the script's AdamW: foreach (PyTorch's default, with temporaries) or fused."""
    if "training.optimizer" in draft.values.keys() | draft.overridden.keys():
        return
    draft.default(STEP, draft.choose(STEP, "how the script's optimizer steps", ("foreach", "fused")))
