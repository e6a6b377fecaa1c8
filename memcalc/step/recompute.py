"""Which layers run their forward a second time in backward instead of keeping its activations."""

from __future__ import annotations

from memcalc.spec.training import TrainingSpec


def recomputed_layers(training: TrainingSpec, num_layers: int) -> frozenset[int]:
    """The layers that are recomputed as a whole; `selective` recomputes the core of attention only, so none.

    `every-k` counts as torchtitan does: layers k-1, 2k-1, ... so that l layers have floor(l/k) recomputed ones.
    """
    plan = training.recompute
    if not isinstance(plan, str):
        return frozenset(plan)
    if plan == "full":
        return frozenset(range(num_layers))
    if plan.startswith("every-"):
        k = int(plan.removeprefix("every-"))
        return frozenset(range(k - 1, num_layers, k))
    return frozenset()
