"""FSDP2 (torch torch/distributed/fsdp/_fully_shard/): one unit a layer, and the root, which has all the rest.

A unit's parameters are gathered into one buffer and copied out of it. Python's references hold the buffers, so the
order is fixed: in forward a buffer lives until the next unit's copy-out; in backward it goes after its own copy-out,
and the next one is gathered at once. Gradients are copied into the input of a reduce-scatter, which lives until the
next one is made.

Shares are rows of the first axis, as many on each rank: what is gathered and reduced is as large as all shares, which
is more than the parameter where rows do not divide, and many times that where there are fewer than ranks (experts).

With CPUOffloadPolicy the shards are the host's: each parameter's is copied to the device for the all-gather and let go
when that is under way, and each reduced gradient leaves for the host at once.
"""

from __future__ import annotations

from math import prod
from typing import Any

from memcalc.estimation.choice import Choice
from memcalc.estimation.engines.buffers import (
    Around,
    Buffers,
    buffer,
    gradient_share,
    host_shards,
    mixed_buffer,
    root_unit,
    units,
)
from memcalc.estimation.items import Item
from memcalc.estimation.sharding import Held, Parameters

SOURCE = "torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param_group.py"
PARAM = "torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py"

# The moments of a step around which the root's parameters are there.
BESIDE_ROOT = (
    *("forward_layer", "forward_head", "before_layer", "before_first_layer", "loss_and_head"),
    *("backward_layer", "backward_last_layer", "backward_first_layer", "backward_embedding"),
    *("after_layer", "after_last_layer", "after_first_layer"),
)


def fsdp2(parameters: Parameters, choice: Choice) -> Buffers:
    """Gathered parameters and reduce-scatter inputs of one stage.

    Stage 3 is reshard_after_forward=True, where a layer's parameters are gathered again in backward; stage 2 is False,
    where they stay. The root's stay either way. With a mixed-precision policy units are gathered in the compute dtype
    and reduced in fp32; else both in the dtype that the parameters are held in.
    """
    gathered = choice.compute if choice.mixed_policy else choice.base
    reduced = "fp32" if choice.mixed_policy else gathered
    spread = choice.spread(2)

    def padded(held: Held) -> int:
        """What all ranks' shares of a tensor come to: rows that do not divide are rounded up, for every rank."""
        return prod(spread.shape(held)) * spread.over(held)

    layers, root = units(parameters, padded), root_unit(parameters, padded)
    unit = max(layers.values(), default=0)
    narrow = converted_elements(parameters, choice)

    def layer(name: str, detail: str, dtype: str = gathered) -> Item:
        return buffer(name, unit, dtype, 0, "P_layer", f"{SOURCE}: {detail}")

    def whole(name: str, detail: str, unit: str = "layer") -> Item:
        elements = root if unit == "root" else max(layers.values(), default=0)
        few = narrow.get(unit, 0)
        return mixed_buffer(name, elements, few, gathered, f"P_{unit}", f"{SOURCE}: {detail}")

    own = whole("layer parameters, gathered", "unshard")
    arriving = whole("all-gather of a layer", "prefetch")
    before = whole("all-gather of the layer before", "its buffer lives until this copy-out")
    scattered = layer("reduce-scatter input of the last layer", "post_backward", reduced)
    leaving = layer("reduce-scatter input of a layer", "post_backward", reduced)
    root_gather = whole("all-gather of the root", "unshard", "root")
    root_scatter = buffer("reduce-scatter input of the root", root, reduced, 0, "P_root", f"{SOURCE}: post_backward")
    stays = whole("root parameters, gathered", "the root is not resharded", "root")
    # torch 2.12 lets the last input go only after the next one exists; all others before.
    both = (scattered,) if choice.torch[:2] == (2, 12) else ()
    around = Around(
        backward_layer=(scattered,),
        backward_first_layer=(scattered,),
        after_layer=(leaving, *both),
        after_last_layer=(leaving,),
        after_first_layer=(leaving, *both),
        backward_embedding=(scattered,),
        after_embedding=(root_scatter, *both),  # as of a layer: its parameters are let go before
        layer_share={kind: _left_behind(elements, choice, reduced) for kind, elements in layers.items()},
    )
    if choice.mixed_policy:  # torchtitan does not reshard the last layer, which would be gathered at once again
        around = around._replace(loss_and_head=(own,))
    sent_for = host_shards(parameters, choice, gathered, f"{PARAM}: all_gather_inputs")
    if choice.zero_stage < 3:
        keep = {
            kind: mixed_buffer(
                *("layer parameters, gathered", elements, narrow.get("layer", 0), gathered),
                *("P_layer", f"{SOURCE}: not resharded"),
            )
            for kind, elements in layers.items()
        }
        around = around._replace(
            forward_layer=(arriving,),
            forward_head=(arriving,),
            before_layer=(before, arriving),
            before_first_layer=(root_gather, arriving),
            layer_gathered=keep,
        )
        return Buffers((), _beside_root(around, stays))
    around = around._replace(
        forward_layer=(own, arriving),
        forward_head=(own, arriving) if choice.mixed_policy else (arriving,),
        before_layer=(own, before, arriving),
        before_first_layer=(own, root_gather, arriving),
        backward_layer=(own, arriving, scattered),
        backward_last_layer=(own, arriving),
        backward_first_layer=(own, scattered),
        after_layer=(arriving, leaving, *both),
        after_last_layer=(arriving, leaving),
        before_backward=(sent_for,) if choice.weights_on_host else (),
        before_first_backward=(arriving,),
    )
    return Buffers((), _beside_root(around, stays))


def converted_elements(parameters: Parameters, choice: Choice) -> dict[str, int]:
    """Elements of a layer and of the root that are gathered in 8 bits (torchao's fsdp_pre_all_gather)."""
    found = {"layer": 0, "root": 0}
    kinds: dict[str, int] = {}
    for held in parameters:
        if choice.narrow_gather is None or len(held.shape) != len(("out", "in")) or held.tensor != "weight":
            continue
        if held.module.startswith("embed") or not choice.narrow_gather.converts(held.module):
            continue
        if held.where == "layer":
            kind = held.module.partition("*")[0]
            kinds[kind] = kinds.get(kind, 0) + held.elements
        else:
            found["root"] += held.count * held.elements
    return found | {"layer": max(kinds.values(), default=0)}


def _beside_root(around: Around, root: Item) -> Around:
    """The root's parameters beside all others, from the first layer's arrival until the root's own gradients leave."""
    there: dict[str, Any] = {name: (root, *getattr(around, name)) for name in BESIDE_ROOT}
    return around._replace(**there)


def _left_behind(elements: int, choice: Choice, reduced: str) -> Item:
    """What a layer's backward leaves on the device until that of the model has ended.

    Its share of the gradients; of those that go to the host nothing, but under HSDP what the groups have added up.
    """
    share = gradient_share(elements, choice, SOURCE)
    if not choice.weights_on_host:
        return share
    if not choice.replicates:
        return share._replace(each=0, block=0)
    detail = f"{SOURCE}: _all_reduce_state"
    return buffer(
        "all-reduced gradients of a layer", -(-elements // choice.data_parallel), reduced, 0, "P_layer/N", detail
    )
