"""Buffers of the engines that spread a step over ranks: buckets, gathered shards, prefetch, reduce-scatter inputs.

Sources: torch 2.13 torch/csrc/distributed/c10d/reducer.cpp (DDP), torch/distributed/fsdp/_fully_shard/ (FSDP2),
DeepSpeed 0.19 runtime/zero/. FSDP2's unit is a layer; what belongs to no layer is the root's.
"""

from __future__ import annotations

from memcalc.estimation.allocation import rounded
from memcalc.estimation.items import Item, from_phase, mask_of
from memcalc.estimation.sharding import Parameters, stage_parameters
from memcalc.estimation.stages import Stage
from memcalc.estimation.states import choice_of, weight_dtype
from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.spec.spec import Spec

# DeepSpeed runtime/zero/config.py: elements of the buffer that gradients are gathered in before they are reduced.
REDUCE_BUCKET_ELEMENTS = 500_000_000
# DeepSpeed: how far stage 3 gathers ahead, in elements (stage3_prefetch_bucket_size).
PREFETCH_ELEMENTS = 50_000_000

BACKWARD = ("backward_1", "backward_2")
PASSES = ("forward_1", "loss_1", "backward_1", "forward_2", "loss_2", "backward_2")


def communication_items(spec: Spec, stage: Stage) -> list[Item]:
    """Every communication buffer of a rank that is not made inside a block (sequence parallelism's are)."""
    if spec.parallelism.data_parallel == 1:
        return []
    parameters = stage_parameters(spec, stage)
    engine, zero = spec.parallelism.engine, spec.parallelism.zero_stage
    if engine == "fsdp2":
        return _fsdp2(spec, parameters)
    if engine == "deepspeed" and zero >= 1:
        return _deepspeed(spec, parameters)
    return _ddp(spec, parameters)


def largest_unit(parameters: Parameters) -> int:
    """Elements of the layer with most parameters."""
    units: dict[str, int] = {}
    for held in parameters:
        if held.where == "layer":
            kind = held.module.partition("*")[0]
            units[kind] = units.get(kind, 0) + held.elements
    return max(units.values(), default=0)


def root_unit(parameters: Parameters) -> int:
    """Elements of what belongs to no layer: embeddings, final norm, head."""
    return sum(held.count * held.elements for held in parameters if held.where != "layer")


def _ddp(spec: Spec, parameters: Parameters) -> list[Item]:
    """Buckets hold a second copy of the gradients, from construction on (gradient_as_bucket_view=False)."""
    recipe = RECIPES[spec.training.recipe]
    if recipe.gradients is None:
        return []  # the main gradients are one contiguous buffer that is reduced as it is (Megatron-LM)
    dtype = weight_dtype(choice_of(spec))
    elements = sum(held.count * held.elements for held in parameters)
    name = "gradient buckets"
    return [_buffer(name, elements, dtype, from_phase("optimizer"), "P", "torch 2.13 c10d/reducer.cpp: buckets")]


def _fsdp2(spec: Spec, parameters: Parameters) -> list[Item]:
    """Around a layer: its own parameters, the gathered buffer of the next one, and the last reduce-scatter's input.

    The root's parameters stay gathered from forward to backward (reshard_after_forward unset on the root).
    """
    choice = choice_of(spec)
    # Autocast casts what was gathered in fp32; else parameters are gathered in the compute dtype, as they are held.
    dtype = reduce_dtype = weight_dtype(choice)
    unit, root = largest_unit(parameters), root_unit(parameters)
    source = "torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param_group.py"
    passes, backward = mask_of(*PASSES), mask_of(*BACKWARD)
    items = [
        _buffer("root parameters, gathered", root, dtype, passes, "P_root", f"{source}: the root is not resharded"),
        _buffer("layer parameters, gathered", unit, dtype, passes, "P_layer", f"{source}: unshard"),
        _buffer("all-gather of the next layer", unit, dtype, passes, "P_layer", f"{source}: prefetch"),
        _buffer(
            "reduce-scatter input of the last layer",
            unit,
            reduce_dtype,
            backward,
            "P_layer",
            f"{source}: post_backward",
        ),
    ]
    return [item for item in items if item.each]


def _deepspeed(spec: Spec, parameters: Parameters) -> list[Item]:
    dtype = spec.training.dtype
    source = "DeepSpeed 0.19 runtime/zero/"
    bucket = "the gradient bucket, allocated whole"
    if spec.parallelism.zero_stage < 3:
        mask = mask_of(*BACKWARD)
        citation = f"{source}stage_1_and_2.py: {bucket}"
        return [_buffer("reduce bucket", REDUCE_BUCKET_ELEMENTS, dtype, mask, "5e8", citation)]
    unit, root = largest_unit(parameters), root_unit(parameters)
    ahead = min(PREFETCH_ELEMENTS, unit)
    always = from_phase("optimizer")
    passes = mask_of(*PASSES)
    return [
        _buffer("reduce bucket", REDUCE_BUCKET_ELEMENTS, dtype, always, "5e8", f"{source}stage3.py: {bucket}, kept"),
        _buffer(
            "parameters of a layer and the root, gathered",
            unit + root,
            dtype,
            passes,
            "(P_layer+P_root)",
            f"{source}partitioned_param_coordinator.py",
        ),
        _buffer("prefetched parameters", ahead, dtype, passes, "min(5e7,P_layer)", f"{source}config.py"),
    ]


def _buffer(name: str, elements: int, dtype: str, mask: int, symbol: str, citation: str) -> Item:
    each = elements * DTYPE_BYTES[dtype]
    formula = f"{DTYPE_BYTES[dtype]}·{symbol}"
    component = Component.COMMUNICATION_BUFFERS
    return Item(component, "engine", name, (elements,), dtype, 1, each, rounded(each), mask, formula, citation)
