"""FP8 weights and scales of Transformer Engine, in addition to bf16 weights or instead of them.

Sources: Transformer Engine 2.11 pytorch/module/base.py (get_weight_workspace, quantization.py),
pytorch/tensor/float8_tensor.py, mxfp8_tensor.py, float8_blockwise_tensor.py; Megatron-LM core_r0.14
core/fp8_utils.py, core/distributed/param_and_grad_buffer.py (fp8_param_gather). Read, not measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.estimation.allocation import rounded
from memcalc.estimation.items import Item, from_phase
from memcalc.estimation.sharding import Held, Parameters
from memcalc.ledger.component import Component
from memcalc.spec.cards import Card
from memcalc.spec.kernels import needs_columns
from memcalc.spec.spec import Spec
from memcalc.workspaces import ceil_div, round_up

WITHOUT_FP8 = ("embed_tokens", "embed_positions", "lm_head", "mlp.router", "shared_expert_gate")
MXFP8_BLOCK = 32  # elements that share a scale of one byte
BLOCK = 128  # side of a weight's square blocks that share an fp32 scale (Float8BlockScaling: w_block_scaling_dim 2)
HISTORY = 1024  # common/recipe/__init__.py, DelayedScaling: amax_history_len


def in_8_bits(held: Held) -> bool:
    """Return whether a parameter is a weight matrix of an FP8 GEMM; of stacked experts each counts as one."""
    shape = held.shape[1:] if held.routed else held.shape
    return len(shape) == len(("out", "in")) and not held.module.endswith(WITHOUT_FP8)


def weight_caches(spec: Spec, parameters: Parameters, card: Card | None) -> Iterator[Item]:
    """Yield one byte per element for forward GEMMs and another for backward GEMMs, live from the first forward on.

    Where the weights themselves are in FP8 (--fp8-param-gather), they serve forward, and backward's copies are created
    with them (get_weight_workspace passes on what is already quantized; quantized_model_init has both usages).
    """
    recipe = spec.training.fp8
    if recipe == "none":
        return
    citation = "Transformer Engine 2.11 pytorch/module/base.py: get_weight_workspace"
    primary = spec.training.fp8_params
    mask = from_phase("model" if primary else "forward_1")
    names = ["weight in FP8", *(["weight in FP8 for backward"] if needs_columns(recipe, card) else [])]
    matrices = 0
    for held in parameters:
        if not in_8_bits(held):
            continue
        experts = held.shape[0] if held.routed else 1
        matrices += held.count * experts
        for by_columns, name in enumerate(names):
            if by_columns or not primary:
                yield Item(
                    *(Component.WEIGHTS, held.module, name, held.shape, "uint8", held.count, held.elements),
                    *(rounded(held.elements), mask, f"1·{held.formula}", citation),
                )
            if scales := _scales(recipe, held, experts, by_columns=bool(by_columns)):
                each, formula = scales
                yield Item(
                    *(Component.WEIGHTS, held.module, f"scales of {name}", (each,), "uint8", held.count, each),
                    *(rounded(each), mask, formula, citation),
                )
    if recipe == "delayed":
        yield from _histories(matrices)


def _scales(recipe: str, held: Held, experts: int, *, by_columns: bool) -> tuple[int, str] | None:
    """Return the bytes of a weight's scales and their formula; None where it has a single scale."""
    if recipe == "mxfp8":
        return held.elements // MXFP8_BLOCK, f"1·{held.formula}/{MXFP8_BLOCK}"
    if recipe != "blockwise":
        return None
    rows, columns = (ceil_div(side, BLOCK) for side in held.shape[-2:])
    first, second = (columns, rows) if by_columns else (rows, columns)
    return 4 * experts * first * round_up(second, 4), f"4·{held.formula}/{BLOCK}², in steps of 4"


def _histories(matrices: int) -> Iterator[Item]:
    """Yield amax histories: per weight for input, weight and output, and for two gradients."""
    citation = "Transformer Engine 2.11 pytorch/quantization.py: DelayedScalingRecipeState"
    for direction, tensors, phase in (("forward", 3, "forward_1"), ("backward", 2, "backward_1")):
        each = 4 * HISTORY * tensors
        name = f"largest values in {direction}"
        yield Item(
            *(Component.WEIGHTS, "fp8", name, (HISTORY, tensors), "fp32", matrices, each, rounded(each)),
            *(from_phase(phase), f"4·{HISTORY}·{tensors}", citation),
        )
