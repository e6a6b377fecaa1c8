"""Which layers run their forward a second time in backward instead of keeping their activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memcalc.spec.segments import Segment, items_of, leaves
from memcalc.spec.training import TrainingSpec

Run = Callable[[int, Tensor], Tensor]  # a layer by its number, and the hidden state it is given


def recomputed_layers(training: TrainingSpec, num_layers: int) -> frozenset[int]:
    """The layers that are recomputed; `selective` recomputes the core of attention only, so none.

    `every-k` counts as torchtitan does: layers k-1, 2k-1, ... so that l layers have floor(l/k) recomputed ones.
    """
    plan = training.recompute
    if not isinstance(plan, str):
        return frozenset(leaves(plan))
    if plan == "full":
        return frozenset(range(num_layers))
    if plan.startswith("every-"):
        k = int(plan.removeprefix("every-"))
        return frozenset(range(k - 1, num_layers, k))
    return frozenset()


def plan_of(training: TrainingSpec, num_layers: int) -> Segment:
    """Every layer in order: a number keeps its activations, a tuple is recomputed as the plan that it is."""
    plan = training.recompute
    named = tuple(sorted(recomputed_layers(training, num_layers))) if isinstance(plan, str) else plan
    return items_of(named, num_layers)


def run_plan(items: Sequence[int | Segment], x: Tensor, run: Run) -> Tensor:
    """The hidden state through the layers of a plan; a segment inside a segment is a checkpoint inside a checkpoint."""
    for item in items:
        if isinstance(item, int):
            x = run(item, x)
        else:
            x = checkpoint(run_plan, item, x, run, use_reentrant=False)
    return x
