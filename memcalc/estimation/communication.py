"""Buffers of the engines that spread a step over ranks: buckets, gathered shards, prefetch, reduce-scatter inputs.

Some are there through whole phases, others only around the layer that is being computed; the timeline adds these.

Sources: torch 2.13 torch/csrc/distributed/c10d/reducer.cpp (DDP), torch/distributed/fsdp/_fully_shard/ (FSDP2),
DeepSpeed 0.19 runtime/zero/. FSDP2's unit is a layer; what belongs to no layer is the root's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from memcalc.estimation.allocation import rounded
from memcalc.estimation.items import Item, from_phase, mask_of
from memcalc.estimation.megatron_engine import received_gradient
from memcalc.estimation.sharding import Parameters, stage_parameters
from memcalc.estimation.stages import Stage
from memcalc.estimation.states import Choice, choice_of, weight_dtype
from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.spec.spec import Spec

# DeepSpeed runtime/zero/config.py: elements of the buffer that gradients are gathered in before they are reduced.
REDUCE_BUCKET_ELEMENTS = 500_000_000
# DeepSpeed: how far stage 3 gathers ahead, in elements (stage3_prefetch_bucket_size).
PREFETCH_ELEMENTS = 50_000_000

BACKWARD = ("backward_1", "backward_2")
PASSES = ("forward_1", "loss_1", "backward_1", "forward_2", "loss_2", "backward_2")


class Around(NamedTuple):
    """Buffers that come and go with the layer that is being computed; their masks are set where they are used."""

    forward_layer: tuple[Item, ...] = ()
    forward_head: tuple[Item, ...] = ()
    backward_layer: tuple[Item, ...] = ()
    backward_last_layer: tuple[Item, ...] = ()  # the first one that backward reaches
    backward_embedding: tuple[Item, ...] = ()
    layer_share: Mapping[bool, Item] = MappingProxyType({})  # of gradients that a (dense, expert) layer leaves behind


class Buffers(NamedTuple):
    """The communication buffers of a rank, but for those made inside a block (sequence parallelism's are)."""

    steady: tuple[Item, ...] = ()
    around: Around = Around()


def communication_buffers(spec: Spec, stage: Stage) -> Buffers:
    """The buffers of the spec's engine on one stage."""
    if spec.parallelism.engine == "megatron":  # the main gradients are one contiguous buffer, reduced as it is
        if stage.has_head or spec.training.implementation != "megatron":
            return Buffers()
        received = (received_gradient(spec),)
        return Buffers((), Around(backward_layer=received, backward_embedding=received))
    if spec.parallelism.shards * spec.parallelism.data_parallel_replicate == 1:
        return Buffers()
    return _buffers(stage_parameters(spec, stage), choice_of(spec))


@lru_cache(maxsize=1024)
def _buffers(parameters: Parameters, choice: Choice) -> Buffers:
    if choice.engine == "fsdp2":
        return _fsdp2(parameters, choice)
    if choice.engine == "deepspeed" and choice.zero_stage >= 1:
        return _deepspeed(parameters, choice)
    return _ddp(parameters, choice)


def units(parameters: Parameters) -> dict[bool, int]:
    """Elements of one layer: of a dense one under False, of one with experts under True."""
    found: dict[str, int] = {}
    for held in parameters:
        if held.where == "layer":
            kind = held.module.partition("*")[0]
            found[kind] = found.get(kind, 0) + held.elements
    experts = {held.module.partition("*")[0] for held in parameters if ".experts." in held.module}
    return {kind in experts: elements for kind, elements in found.items()}


def root_unit(parameters: Parameters) -> int:
    """Elements of what belongs to no layer: embeddings, final norm, head."""
    return sum(held.count * held.elements for held in parameters if held.where != "layer")


def _ddp(parameters: Parameters, choice: Choice) -> Buffers:
    """Buckets hold a second copy of the gradients, from construction on (gradient_as_bucket_view=False)."""
    if RECIPES[choice.recipe].gradients is None:
        return Buffers()  # the main gradients are one contiguous buffer that is reduced as it is (Megatron-LM)
    elements: dict[str, int] = {}
    for held in parameters:
        if held.trains:  # a frozen parameter is in no bucket
            dtype = held.dtype or weight_dtype(choice)
            elements[dtype] = elements.get(dtype, 0) + held.count * held.elements
    source = "torch 2.13 c10d/reducer.cpp: buckets"
    mask = from_phase("optimizer")
    return Buffers(
        tuple(_buffer("gradient buckets", count, dtype, mask, "P", source) for dtype, count in elements.items())
    )


def _fsdp2(parameters: Parameters, choice: Choice) -> Buffers:
    """One unit a layer, and the root, whose parameters stay gathered from forward to backward.

    Around a layer: its parameters, the all-gather of the next one (in forward the layer's own, which lives until the
    next copy-out), and in backward the input of the last reduce-scatter, which lives until the next one.
    """
    # Autocast casts what was gathered in fp32; else parameters are gathered in the dtype that they are held in.
    dtype = weight_dtype(choice)
    source = "torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param_group.py"
    layers, root = units(parameters), root_unit(parameters)
    unit = max(layers.values(), default=0)

    def layer(name: str, detail: str) -> Item:
        return _buffer(name, unit, dtype, 0, "P_layer", f"{source}: {detail}")

    scattered = layer("reduce-scatter input of the last layer", "post_backward")
    shares = {experts: _share(elements, choice, source) for experts, elements in layers.items()}
    root_scatter = _buffer("reduce-scatter input of the root", root, dtype, 0, "P_root", f"{source}: post_backward")
    around = Around(backward_layer=(scattered,), backward_embedding=(scattered, root_scatter), layer_share=shares)
    if choice.zero_stage < 3:  # reshard_after_forward=False: parameters stay gathered, as whole weights
        return Buffers((), around)
    own = layer("layer parameters, gathered", "unshard")
    ahead = layer("all-gather of a layer", "prefetch")
    passes = mask_of(*PASSES)
    gathered_root = _buffer(
        "root parameters, gathered", root, dtype, passes, "P_root", f"{source}: the root is not resharded"
    )
    around = around._replace(
        forward_layer=(own, ahead),
        forward_head=(ahead,),
        backward_layer=(own, ahead, scattered),
        backward_last_layer=(own, ahead),
    )
    return Buffers((gathered_root,), around)


def _deepspeed(parameters: Parameters, choice: Choice) -> Buffers:
    """A bucket that gradients are gathered in, allocated whole; at stage 3 also parameters, gathered layer by layer."""
    source = "DeepSpeed 0.19 runtime/zero/"
    dtype = choice.compute
    layers, root = units(parameters), root_unit(parameters)
    shares = {experts: _share(elements, choice, source) for experts, elements in layers.items()}
    bucket = "the gradient bucket is allocated whole"
    if choice.zero_stage < 3:
        citation = f"{source}stage_1_and_2.py: {bucket}"
        steady = _buffer("reduce bucket", REDUCE_BUCKET_ELEMENTS, dtype, mask_of(*BACKWARD), "5e8", citation)
        return Buffers((steady,), Around(layer_share=shares) if choice.zero_stage == 2 else Around())
    unit = max(layers.values(), default=0)
    citation = f"{source}stage3.py: {bucket} and kept"
    coordinator = f"{source}partitioned_param_coordinator.py"
    steady = _buffer("reduce bucket", REDUCE_BUCKET_ELEMENTS, dtype, from_phase("optimizer"), "5e8", citation)
    gathered_root = _buffer("root parameters, gathered", root, dtype, mask_of(*PASSES), "P_root", coordinator)
    own = _buffer("layer parameters, gathered", unit, dtype, 0, "P_layer", coordinator)
    ahead_elements = min(PREFETCH_ELEMENTS, unit)
    ahead = _buffer("prefetched parameters", ahead_elements, dtype, 0, "min(5e7,P_layer)", f"{source}config.py")
    layer = (own, ahead)
    around = Around(forward_layer=layer, backward_layer=layer, backward_last_layer=layer, layer_share=shares)
    return Buffers((steady, gathered_root), around)


def _share(elements: int, choice: Choice, source: str) -> Item:
    """A rank's share of a layer's gradients, once they are reduced; main gradients that always exist need none."""
    recipe = RECIPES[choice.recipe]
    each = 0
    if recipe.gradients is not None:
        each += DTYPE_BYTES[weight_dtype(choice)]
        each += DTYPE_BYTES["fp32"] if recipe.main_gradients_live == "backward" else 0
    elements = -(-elements // choice.data_parallel)
    share = _buffer("gradient share of a layer", elements, "uint8", 0, "P_layer/N", f"{source}: reduced gradients")
    size = elements * each
    return share._replace(component=Component.GRADIENTS, shape=(size,), each=size, block=rounded(size))


def _buffer(name: str, elements: int, dtype: str, mask: int, symbol: str, citation: str) -> Item:
    each = elements * DTYPE_BYTES[dtype]
    formula = f"{DTYPE_BYTES[dtype]}·{symbol}"
    component = Component.COMMUNICATION_BUFFERS
    return Item(component, "engine", name, (elements,), dtype, 1, each, rounded(each), mask, formula, citation)
