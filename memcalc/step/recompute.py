"""Recomputation of layers: which layers rerun their forward in backward instead of saving activations."""

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

from memcalc.spec.matmuls import layer_matmuls
from memcalc.spec.recompute_plan import Segment, items_of, leaves
from memcalc.spec.spec import Spec
from memcalc.spec.training import TrainingSpec

PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001 -- the kernel's only name
        torch.ops.aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001 -- as above
    }
)

Contexts = Callable[[], tuple[Any, Any]]
Run = Callable[[int, Tensor], Tensor]  # a layer's index and its input hidden state


def recomputed_layers(training: TrainingSpec, num_layers: int) -> frozenset[int]:
    """Return the layers that are recomputed; none for `selective`, which recomputes the core of attention only.

    `every-k` counts as torchtitan does: layers k-1, 2k-1, ..., so that floor(l/k) of l layers are recomputed.
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
    """Return every layer in order: a number saves its activations, a tuple is recomputed as a nested plan."""
    plan = training.recompute
    named = tuple(sorted(recomputed_layers(training, num_layers))) if isinstance(plan, str) else plan
    return items_of(named, num_layers)


def run_plan(items: Sequence[int | Segment], x: Tensor, run: Run, contexts: Contexts = noop_context_fn) -> Tensor:
    """Return the hidden state after the layers of a plan; nested segments are nested checkpoints.

    Args:
        items: the plan.
        x: input of the first layer.
        run: runs a layer.
        contexts: `context_fn` of checkpoint, which selects tensors that a recomputed layer saves.
    """
    for item in items:
        if isinstance(item, int):
            x = run(item, x)
        else:
            x = checkpoint(run_plan, item, x, run, use_reentrant=False, context_fn=contexts)
    return x


def contexts_of(spec: Spec) -> Contexts:
    """Return the `context_fn` of the run's recomputed layers."""
    names = spec.training.recompute_keep
    if not names:
        return noop_context_fn
    order = layer_matmuls(spec.model, spec.training)
    kept = frozenset(order.index(name) for name in names)
    return lambda: create_selective_checkpoint_contexts(_Policy(kept))  # type: ignore[no-untyped-call]


class _Policy:
    """Selective checkpointing policy that saves some of a layer's matmuls, by index, and recomputes other operators.

    Source: torch/utils/checkpoint.py, create_selective_checkpoint_contexts. Versions before 2.13 call the policy again
    during recomputation, hence two counters.
    """

    def __init__(self, saved: frozenset[int]) -> None:
        self.saved = saved
        self.count = {False: 0, True: 0}

    def __call__(self, context: SelectiveCheckpointContext, operator: object, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator not in PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = self.count[context.is_recompute]
        self.count[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if number in self.saved else CheckpointPolicy.PREFER_RECOMPUTE
