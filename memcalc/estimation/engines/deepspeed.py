"""DeepSpeed's ZeRO (DeepSpeed 0.19 runtime/zero/) with its defaults: contiguous gradients, no overlap below stage 3."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.estimation.allocation import rounded
from memcalc.estimation.choice import Choice
from memcalc.estimation.engines.buffers import Around, Buffers, buffer, gradient_share, root_unit, units
from memcalc.estimation.engines.zero_offload import gradient_passage
from memcalc.estimation.items import Item, from_phase, mask_of
from memcalc.estimation.sharding import Parameters
from memcalc.ledger.component import Component

SOURCE = "DeepSpeed 0.19 runtime/zero/"

# runtime/zero/config.py: elements of the buffer that gradients are gathered in before they are reduced.
REDUCE_BUCKET_ELEMENTS = 500_000_000
# stage3_prefetch_bucket_size: how far stage 3 gathers ahead of what is used, in elements.
PREFETCH_ELEMENTS = 50_000_000
# stage3_max_live_parameters: how many gathered elements there may be; below that, what is gathered ahead stays.
MAX_LIVE_ELEMENTS = 1_000_000_000

FIRST_PASSES = ("forward_1", "loss_1", "backward_1")
LATER_PASSES = ("forward_2", "loss_2", "backward_2")


def deepspeed(parameters: Parameters, choice: Choice) -> Buffers:
    """A bucket that gradients are gathered in, allocated whole; at stage 3 also gathered parameters."""
    layers = units(parameters)
    elements = sum(held.count * held.elements for held in parameters)
    shares = {kind: gradient_share(size, choice, SOURCE) for kind, size in layers.items()}
    # What is reduced together is flattened once more: the whole bucket, or all gradients where they are fewer.
    flat = min(elements, REDUCE_BUCKET_ELEMENTS)
    copy = buffer("flattened bucket", flat, choice.compute, 0, "min(5e8,P)", f"{SOURCE}: one copy is reduced")
    if choice.offloads:  # a gradient leaves for the host as soon as it is reduced
        shares = {kind: share._replace(each=0, block=0) for kind, share in shares.items()}
    if choice.zero_stage < 3:
        bucket = _bucket(choice, 0, "stage_1_and_2.py: allocated whole at the first gradient, freed after backward")
        return Buffers(
            tuple(_standing(parameters, elements, choice)),
            Around(
                backward_head=(bucket,),
                backward_layer=(bucket,),
                backward_last_layer=(bucket,),
                backward_first_layer=(bucket,),
                on_gradient=(bucket, copy) if elements > REDUCE_BUCKET_ELEMENTS else (),
                backward_embedding=(bucket, copy),
                layer_share=shares,
            ),
        )
    bucket = _bucket(choice, from_phase("optimizer"), "stage3.py: allocated whole and kept")
    return Buffers((bucket, *_gathered(parameters, choice)), Around(backward_embedding=(copy,)))


def _standing(parameters: Parameters, elements: int, choice: Choice) -> Iterator[Item]:
    """What stages 1 and 2 hold beside the bucket."""
    if choice.masters_follow_flattening or not choice.offloads:
        yield _flattening(elements, choice)
    if choice.offloads:
        passage = gradient_passage(parameters, choice, "temp_grad_buffer_for_gpu_offload")
        yield passage._replace(block=rounded(passage.each))
        share = -(-elements // choice.data_parallel)
        source = f"{SOURCE}stage_1_and_2.py: step: the updated share comes back in fp32, then is cast"
        mask = mask_of("optimizer_step_1", "optimizer_step_2")
        back = buffer("updated weights from the host", share, "fp32", mask, "P/N", source)
        yield back._replace(component=Component.TEMPORARIES)


def _flattening(elements: int, choice: Choice) -> Item:
    """What construction needs for a moment: the weights once more in one piece, or later a master's worth of zeros."""
    source = f"{SOURCE}stage_1_and_2.py: __init__"
    mask = mask_of("optimizer")
    if choice.masters_follow_flattening:
        return buffer("weights, flattened beside themselves", elements, choice.base, mask, "P", source)
    share = -(-elements // choice.data_parallel)
    return buffer("zeros in the shape of the master", share, "fp32", mask, "P/N", source)


def _bucket(choice: Choice, mask: int, detail: str) -> Item:
    return buffer("reduce bucket", REDUCE_BUCKET_ELEMENTS, choice.compute, mask, "5e8", f"{SOURCE}{detail}")


def _gathered(parameters: Parameters, choice: Choice) -> list[Item]:
    """Parameters that are whole: in the first step those in use; later, when the order is known, all up to a bound.

    partitioned_param_coordinator.py gathers ahead until max_live_parameters are there. The last one to be gathered may
    go beyond it: a matrix of the largest size.
    """
    coordinator = f"{SOURCE}partitioned_param_coordinator.py"
    elements = sum(held.count * held.elements for held in parameters)
    largest = max(held.elements for held in parameters if held.where == "layer" or held.count == 1)
    unit = max([*units(parameters).values(), root_unit(parameters)])
    live = min(elements, MAX_LIVE_ELEMENTS + min(largest, PREFETCH_ELEMENTS))
    first = buffer("parameters in use, gathered", unit, choice.compute, mask_of(*FIRST_PASSES), "P_layer", coordinator)
    symbol = "P" if live == elements else "(1e9+P_matrix)"
    later = buffer("parameters, gathered", live, choice.compute, mask_of(*LATER_PASSES), symbol, coordinator)
    return [first, later]
