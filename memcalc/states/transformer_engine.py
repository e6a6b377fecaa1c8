"""FP8 weights and scales of Transformer Engine, in addition to bf16 weights or instead of them.

Sources: Transformer Engine 2.11 pytorch/module/base.py (get_weight_workspace, quantization.py),
pytorch/tensor/float8_tensor.py, mxfp8_tensor.py, float8_blockwise_tensor.py; Megatron-LM core_r0.14
core/fp8_utils.py, core/distributed/param_and_grad_buffer.py (fp8_param_gather). Read, not measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, from_phase
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.hardware.kernels import needs_columns
from memcalc.spec.spec import Spec
from memcalc.workspaces import ceil_div, round_up

WITHOUT_FP8 = ("embed_tokens", "embed_positions", "lm_head", "mlp.router", "shared_expert_gate")
MXFP8_BLOCK = 32  # elements that share a scale of one byte
BLOCK = 128  # side of a weight's square blocks that share an fp32 scale (Float8BlockScaling: w_block_scaling_dim 2)
HISTORY = 1024  # common/recipe/__init__.py, DelayedScaling: amax_history_len


def in_8_bits(parameter: LocalParameter) -> bool:
    """Return whether a parameter is a weight matrix of an FP8 GEMM; of stacked experts each counts as one."""
    shape = parameter.shape[1:] if parameter.routed else parameter.shape
    return len(shape) == len(("out", "in")) and not parameter.module.endswith(WITHOUT_FP8)


def weight_caches(spec: Spec, parameters: LocalParameters, gpu: GpuSpec | None) -> Iterator[RowDraft]:
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
    names = ["weight in FP8", *(["weight in FP8 for backward"] if needs_columns(recipe, gpu) else [])]
    matrices = 0
    for parameter in parameters:
        if not in_8_bits(parameter):
            continue
        experts = parameter.shape[0] if parameter.routed else 1
        matrices += parameter.count * experts
        for by_columns, name in enumerate(names):
            if by_columns or not primary:
                yield RowDraft(
                    *(
                        Component.WEIGHTS,
                        parameter.module,
                        name,
                        parameter.shape,
                        "uint8",
                        parameter.count,
                        parameter.elements,
                    ),
                    *(rounded(parameter.elements), mask, f"1·{parameter.formula}", citation),
                )
            if scales := _scales(recipe, parameter, experts, by_columns=bool(by_columns)):
                each, formula = scales
                yield RowDraft(
                    *(
                        Component.WEIGHTS,
                        parameter.module,
                        f"scales of {name}",
                        (each,),
                        "uint8",
                        parameter.count,
                        each,
                    ),
                    *(rounded(each), mask, formula, citation),
                )
    if recipe == "delayed":
        yield from _histories(matrices)


def _scales(recipe: str, parameter: LocalParameter, experts: int, *, by_columns: bool) -> tuple[int, str] | None:
    """Return the bytes of a weight's scales and their formula; None where it has a single scale."""
    if recipe == "mxfp8":
        return parameter.elements // MXFP8_BLOCK, f"1·{parameter.formula}/{MXFP8_BLOCK}"
    if recipe != "blockwise":
        return None
    rows, columns = (ceil_div(side, BLOCK) for side in parameter.shape[-2:])
    first, second = (columns, rows) if by_columns else (rows, columns)
    return 4 * experts * first * round_up(second, 4), f"4·{parameter.formula}/{BLOCK}², in steps of 4"


def _histories(matrices: int) -> Iterator[RowDraft]:
    """Yield amax histories: per weight for input, weight and output, and for two gradients."""
    citation = "Transformer Engine 2.11 pytorch/quantization.py: DelayedScalingRecipeState"
    for direction, tensors, phase in (("forward", 3, "forward_1"), ("backward", 2, "backward_1")):
        each = 4 * HISTORY * tensors
        name = f"largest values in {direction}"
        yield RowDraft(
            *(Component.WEIGHTS, "fp8", name, (HISTORY, tensors), "fp32", matrices, each, rounded(each)),
            *(from_phase(phase), f"4·{HISTORY}·{tensors}", citation),
        )
