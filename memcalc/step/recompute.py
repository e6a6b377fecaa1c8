"""Which layers run their forward a second time in backward instead of keeping their activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from memcalc.spec.products import layer_products
from memcalc.spec.segments import Segment, items_of, leaves
from memcalc.spec.spec import Spec
from memcalc.spec.training import TrainingSpec

PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001 -- the kernel's only name
        torch.ops.aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001 -- likewise
    }
)

Contexts = Callable[[], tuple[Any, Any]]
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


def run_plan(items: Sequence[int | Segment], x: Tensor, run: Run, contexts: Contexts = noop_context_fn) -> Tensor:
    """The hidden state through the layers of a plan; a segment inside a segment is a checkpoint inside a checkpoint.

    Args:
        items: the plan.
        x: the first layer's input.
        run: runs a layer.
        contexts: what a recomputed layer keeps all the same, as checkpoint's `context_fn`.
    """
    for item in items:
        if isinstance(item, int):
            x = run(item, x)
        else:
            x = checkpoint(run_plan, item, x, run, use_reentrant=False, context_fn=contexts)
    return x


def contexts_of(spec: Spec) -> Contexts:
    """`context_fn` of the run's recomputed layers."""
    names = spec.training.recompute_keep
    if not names:
        return noop_context_fn
    order = layer_products(spec.model, spec.training)
    kept = frozenset(order.index(name) for name in names)
    return lambda: create_selective_checkpoint_contexts(_Policy(kept))  # type: ignore[no-untyped-call]


class _Policy:
    """Keeps some of a layer's products by their numbers; other operators run again.

    Source: torch/utils/checkpoint.py, create_selective_checkpoint_contexts. Releases before 2.13 ask again in the
    second forward, hence two counts.
    """

    def __init__(self, kept: frozenset[int]) -> None:
        self.kept = kept
        self.count = {False: 0, True: 0}

    def __call__(self, context: SelectiveCheckpointContext, operator: object, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator not in PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = self.count[context.is_recompute]
        self.count[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if number in self.kept else CheckpointPolicy.PREFER_RECOMPUTE
