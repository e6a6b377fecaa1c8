"""What Transformer Engine holds for matrix products in 8 bits, beside the weights in 16 that stay.

Sources: Transformer Engine 2.11 pytorch/module/base.py (get_weight_workspace, quantization.py),
pytorch/tensor/float8_tensor.py, mxfp8_tensor.py. Read, not measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.estimation.allocation import rounded
from memcalc.estimation.items import Item, from_phase
from memcalc.estimation.sharding import Parameters
from memcalc.ledger.component import Component
from memcalc.spec.cards import Card
from memcalc.spec.kernels import needs_columns
from memcalc.spec.spec import Spec

WITHOUT_FP8 = ("embed_tokens", "embed_positions", "lm_head", "mlp.router", "shared_expert_gate")
MXFP8_BLOCK = 32  # elements that share a scale of one byte
HISTORY = 1024  # common/recipe/__init__.py, DelayedScaling: amax_history_len


def weight_caches(spec: Spec, parameters: Parameters, card: Card | None) -> Iterator[Item]:
    """A byte an element for the products of forward, another for those of backward; kept from the first forward on."""
    recipe = spec.training.fp8
    if recipe == "none":
        return
    citation = "Transformer Engine 2.11 pytorch/module/base.py: get_weight_workspace"
    mask = from_phase("forward_1")
    names = ["weight in 8 bits", *(["weight in 8 bits for backward"] if needs_columns(recipe, card) else [])]
    matrices = 0
    for held in parameters:
        shape = held.shape[1:] if held.routed else held.shape
        if len(shape) != len(("out", "in")) or held.module.endswith(WITHOUT_FP8):
            continue
        experts = held.shape[0] if held.routed else 1
        matrices += held.count * experts
        scales = held.elements // MXFP8_BLOCK if recipe == "mxfp8" else 0
        for name in names:
            yield Item(
                *(Component.WEIGHTS, held.module, name, held.shape, "uint8", held.count, held.elements),
                *(rounded(held.elements), mask, f"1·{held.formula}", citation),
            )
            if scales:
                yield Item(
                    *(Component.WEIGHTS, held.module, f"scales of {name}", (scales,), "uint8", held.count, scales),
                    *(rounded(scales), mask, f"1·{held.formula}/{MXFP8_BLOCK}", citation),
                )
    if recipe == "delayed":
        yield from _histories(matrices)


def _histories(matrices: int) -> Iterator[Item]:
    """Of each matrix the largest values of input, weight and output, and of two gradients, in the last steps."""
    citation = "Transformer Engine 2.11 pytorch/quantization.py: DelayedScalingRecipeState"
    for direction, tensors, phase in (("forward", 3, "forward_1"), ("backward", 2, "backward_1")):
        each = 4 * HISTORY * tensors
        name = f"largest values in {direction}"
        yield Item(
            *(Component.WEIGHTS, "fp8", name, (HISTORY, tensors), "fp32", matrices, each, rounded(each)),
            *(from_phase(phase), f"4·{HISTORY}·{tensors}", citation),
        )
