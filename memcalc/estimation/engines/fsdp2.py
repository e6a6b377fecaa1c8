"""FSDP2 (torch torch/distributed/fsdp/_fully_shard/): one unit a layer, and the root, which has all the rest.

A unit's parameters are gathered into one buffer and copied out of it. Python's references hold the buffers, so the
order is fixed: in forward a buffer lives until the next unit's copy-out; in backward it goes after its own copy-out,
and the next one is gathered at once. Gradients are copied into the input of a reduce-scatter, which lives until the
next one is made.
"""

from __future__ import annotations

from memcalc.estimation.choice import Choice
from memcalc.estimation.engines.buffers import Around, Buffers, buffer, gradient_share, root_unit, units
from memcalc.estimation.items import Item, mask_of
from memcalc.estimation.sharding import Parameters

SOURCE = "torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param_group.py"

PASSES = ("forward_1", "loss_1", "backward_1", "forward_2", "loss_2", "backward_2")


def fsdp2(parameters: Parameters, choice: Choice) -> Buffers:
    """Gathered parameters and reduce-scatter inputs of one stage.

    Stage 3 is reshard_after_forward=True, where a layer's parameters are gathered again in backward; stage 2 is False,
    where they stay. The root's stay either way. With a mixed-precision policy units are gathered in the compute dtype
    and reduced in fp32; else both in the dtype that the parameters are held in.
    """
    gathered = choice.compute if choice.mixed_policy else choice.base
    reduced = "fp32" if choice.mixed_policy else gathered
    layers, root = units(parameters), root_unit(parameters)
    unit = max(layers.values(), default=0)

    def layer(name: str, detail: str, dtype: str = gathered) -> Item:
        return buffer(name, unit, dtype, 0, "P_layer", f"{SOURCE}: {detail}")

    own = layer("layer parameters, gathered", "unshard")
    arriving = layer("all-gather of a layer", "prefetch")
    before = layer("all-gather of the layer before", "its buffer lives until this copy-out")
    scattered = layer("reduce-scatter input of the last layer", "post_backward", reduced)
    leaving = layer("reduce-scatter input of a layer", "post_backward", reduced)
    root_gather = buffer("all-gather of the root", root, gathered, 0, "P_root", f"{SOURCE}: unshard")
    root_scatter = buffer("reduce-scatter input of the root", root, reduced, 0, "P_root", f"{SOURCE}: post_backward")
    stays = buffer(
        "root parameters, gathered", root, gathered, mask_of(*PASSES), "P_root", f"{SOURCE}: the root is not resharded"
    )
    # torch 2.12 lets the last input go only after the next one exists; all others before.
    both = (scattered,) if choice.torch[:2] == (2, 12) else ()
    around = Around(
        backward_layer=(scattered,),
        backward_first_layer=(scattered,),
        after_layer=(leaving, *both),
        after_last_layer=(leaving,),
        after_first_layer=(leaving, *both),
        backward_embedding=(scattered,),
        after_embedding=(scattered, root_scatter),
        layer_share={kind: gradient_share(elements, choice, SOURCE) for kind, elements in layers.items()},
    )
    if choice.mixed_policy:  # torchtitan does not reshard the last layer, which would be gathered at once again
        around = around._replace(loss_and_head=(own,))
    if choice.zero_stage < 3:
        keep = {
            kind: buffer("layer parameters, gathered", elements, gathered, 0, "P_layer", f"{SOURCE}: not resharded")
            for kind, elements in layers.items()
        }
        around = around._replace(
            forward_layer=(arriving,),
            forward_head=(arriving,),
            before_layer=(before, arriving),
            before_first_layer=(root_gather, arriving),
            layer_gathered=keep,
        )
        return Buffers((stays,), around)
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
    )
    return Buffers((stays,), around)
