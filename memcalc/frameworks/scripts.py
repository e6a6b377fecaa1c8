"""What a script around Accelerate or DeepSpeed decides, and no file says."""

from __future__ import annotations

from memcalc.frameworks.draft import Draft

FIELD = "training.logits_until"


def place_outputs(draft: Draft) -> None:
    """Whether the script keeps the model's outputs through backward.

    `outputs = model(**batch)` does; `loss = model(**batch).loss` frees all but the loss.
    """
    what = "whether the script keeps the model's outputs through backward (`outputs = model(...)`)"
    draft.default(FIELD, draft.choose(FIELD, what, ("backward", "loss")))
