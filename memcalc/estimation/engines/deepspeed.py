"""DeepSpeed's ZeRO (DeepSpeed 0.19 runtime/zero/), defaults: contiguous gradients, no overlap below stage 3.

`zero_reduction` gives the order of gradient reductions, `zero3_gathering` the parameters that stage 3 has gathered;
this module turns both into buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memcalc.estimation.allocation import rounded
from memcalc.estimation.choice import Choice
from memcalc.estimation.engines.buffers import Around, Buffers, buffer, gradient_share, trained_elements, units
from memcalc.estimation.engines.zero3_gathering import gathered
from memcalc.estimation.engines.zero_offload import gradient_passage
from memcalc.estimation.engines.zero_reduction import Reduction, after_backward, first_share, in_backward
from memcalc.estimation.items import Item, from_phase, mask_of
from memcalc.estimation.sharding import Parameters
from memcalc.ledger.component import Component
from memcalc.spec.zero import DEFAULT as ZERO

SOURCE = "DeepSpeed 0.19 runtime/zero/"

# phases from the first micro-batch's backward to the last one's
BETWEEN = mask_of("forward_1", "loss_1", "backward_1", "forward_2", "loss_2", "backward_2")


def deepspeed(parameters: Parameters, choice: Choice) -> Buffers:
    """Return the reduce bucket, allocated at full size, and, at stage 3, the gathered parameters."""
    if choice.zero_stage == 3:
        return _stage_3(parameters, choice)
    # Frozen parameters are in no optimizer group, so they are replicated.
    trained = Parameters(held for held in parameters if held.trains)
    around = Around()
    standing = list(_standing(trained, choice))
    detail = "stage_1_and_2.py: setup_buckets: allocated whole at the first gradient, freed after "
    if choice.accumulates and choice.reduces_after_backward:
        standing.append(_bucket(choice, BETWEEN, f"{detail}the last micro-batch"))
    else:
        bucket = _bucket(choice, 0, f"{detail}backward")
        around = Around(
            backward_head=(bucket,) if any(held.where == "head" for held in trained) else (),
            backward_layer=(bucket,),
            backward_last_layer=(bucket,),
            backward_first_layer=(bucket,),
            backward_embedding=(bucket,),
        )
    reducing = _after_backward if choice.reduces_after_backward else _in_backward
    return Buffers(tuple(standing), reducing(parameters, choice, around))


def _stage_3(parameters: Parameters, choice: Choice) -> Buffers:
    """Return stage 3's buffers: the persistent bucket, and the parameters gathered around each layer."""
    bucket = _bucket(choice, from_phase("optimizer"), "stage3.py: allocated whole and kept")
    largest = max(held.elements for held in parameters if held.trains)
    source = f"{SOURCE}stage3.py: create_reduce_and_remove_grad_hooks gathers each parameter for a moment"
    hooked = buffer("largest parameter, gathered", largest, choice.compute, mask_of("optimizer"), "P_matrix", source)
    found = gathered(parameters, choice.zero, recomputes=choice.recomputes, detached=choice.detached)
    last = _gathered(found.backward_layers[-1], choice)
    first = last if len(found.backward_layers) == 1 else _gathered(found.backward_layers[0], choice)
    around = Around(
        forward_layer=(_gathered(found.forward_layers[-1], choice),),
        forward_widest=(_gathered(found.forward_layers[found.widest_forward], choice),),
        forward_head=(_gathered(found.forward_head, choice),),
        loss_and_head=(_gathered(max(found.loss, found.backward_head), choice),),
        backward_last_layer=(last,),
        backward_layer=(_gathered(max(found.backward_layers[1:-1], default=0), choice),),
        backward_first_layer=(first,),
        backward_embedding=(_gathered(found.backward_embedding, choice),),
    )
    return Buffers((bucket, hooked), _in_backward(parameters, choice, around, found.at_gradient))


def _in_backward(parameters: Parameters, choice: Choice, around: Around, there: Sequence[int] = ()) -> Around:
    """Return the buffers with those of reductions during backward.

    Args:
        parameters: parameters of the stage.
        choice: options of the run.
        around: the buffers so far.
        there: elements that stage 3 has gathered when each gradient is produced.
    """
    whole = choice.zero_stage == 3
    reductions = in_backward(parameters, choice.data_parallel if whole else 0, choice.zero.reduce_bucket_size)
    file = "stage3.py" if whole else "stage_1_and_2.py"
    detail = f"{SOURCE}{file}: reduce_independent_p_g_buckets_and_remove_grads"

    def height(each: Reduction) -> int:
        return each.copied + each.beside + (there[each.number] if whole else 0)

    def at(place: str) -> tuple[Item, ...]:
        """Return what the largest reduction at a place flattens, and its gradients too large for the bucket."""
        most = max((each for each in reductions if each.place == place), key=height, default=None)
        if most is None:
            return ()
        found = [_gathered(there[most.number], choice)] if whole and place == "layer" else []
        if most.copied:
            found.append(buffer("flattened bucket", most.copied, choice.compute, 0, "P_bucket", detail))
        if most.beside:
            name = "gradient larger than the bucket"
            found.append(buffer(name, most.beside, choice.compute, 0, "P_matrix", detail))
        return tuple(found)

    in_layers = at("layer")
    shares = {kind: gradient_share(size, choice, SOURCE) for kind, size in units(parameters, trained_elements).items()}
    if choice.offloads:  # a gradient is moved to the host as soon as it is reduced
        shares = {kind: share._replace(each=0, block=0) for kind, share in shares.items()}
    return around._replace(
        second_of_head=at("head"),
        on_gradient=(*around.backward_layer, *in_layers) if in_layers and not whole else in_layers,
        gradient_of_embedding=at("embedding"),
        after_embedding=(*around.backward_embedding, *at("end")),
        layer_share={} if whole else shares,  # stage 3 has one buffer, counted with the model states
    )


def _after_backward(parameters: Parameters, choice: Choice, around: Around) -> Around:
    """Return stage 1's buffers: after backward, unsharded gradients pass through the bucket in parameter order.

    The first rank's shard holds the first parameters, so its buffer is allocated at once.
    """
    reductions = after_backward(parameters, choice.zero.reduce_bucket_size)
    own = first_share(parameters, choice.data_parallel).touched
    heights = [reductions[0].copied - reductions[0].moved, own - reductions[0].moved]
    heights += (own + each.copied - each.moved for each in reductions[1:])
    detail = f"{SOURCE}stage_1_and_2.py: reduce_gradients, copy_grads_in_partition"
    name = "flattened bucket and own gradients, beyond freed memory"
    beyond = buffer(name, max(0, *heights), choice.compute, 0, "P_bucket", detail)
    return around._replace(after_embedding=(*around.backward_embedding, *((beyond,) if beyond.each else ())))


def _standing(parameters: Parameters, choice: Choice) -> Iterator[Item]:
    """Yield the persistent buffers of stages 1 and 2 for trained parameters, besides the bucket."""
    elements = sum(held.count * held.elements for held in parameters)
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
    elif choice.accumulates and not choice.reduces_after_backward:
        yield _wholes(parameters, choice)


def _wholes(parameters: Parameters, choice: Choice) -> Item:
    """Return the unsharded gradients that stage 2 accumulates for parameters partly in the first rank's shard."""
    share = -(-sum(held.count * held.elements for held in parameters) // choice.data_parallel)
    beyond = max(0, first_share(parameters, choice.data_parallel).touched - share)
    source = f"{SOURCE}stage_1_and_2.py: get_all_grad_tensors(params_in_partition)"
    whole = buffer("gradients beyond the rank's shard", beyond, choice.base, BETWEEN, "P_touched - P/N", source)
    return whole._replace(component=Component.GRADIENTS)


def _flattening(elements: int, choice: Choice) -> Item:
    """Return the temporary of construction: a flattened copy of the weights, or zeros as large as the masters."""
    source = f"{SOURCE}stage_1_and_2.py: __init__"
    mask = mask_of("optimizer")
    if choice.masters_follow_flattening:
        return buffer("weights, copied into a flat buffer", elements, choice.base, mask, "P", source)
    share = -(-elements // choice.data_parallel)
    return buffer("zeros in the shape of the master", share, "fp32", mask, "P/N", source)


def _gathered(elements: int, choice: Choice) -> Item:
    source = f"{SOURCE}partitioned_param_coordinator.py"
    return buffer("parameters, gathered", elements, choice.compute, 0, "P_gathered", source)


def _bucket(choice: Choice, mask: int, detail: str) -> Item:
    size = choice.zero.reduce_bucket_size
    formula = "5e8" if size == ZERO.reduce_bucket_size else "reduce_bucket_size"
    return buffer("reduce bucket", size, choice.compute, mask, formula, f"{SOURCE}{detail}")
