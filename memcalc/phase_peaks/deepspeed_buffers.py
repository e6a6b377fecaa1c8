"""DeepSpeed's ZeRO (DeepSpeed 0.19 runtime/zero/), defaults: contiguous gradients, no overlap below stage 3.

`zero_reduction` gives the order of gradient reductions, `zero3_gathering` the parameters that stage 3 has gathered;
this module turns both into buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.gradient_order import first_rank_slice
from memcalc.layout.local_parameters import LocalParameters
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, from_phase, mask_of
from memcalc.phase_peaks.layer_buffers import (
    EngineBuffers,
    PerLayerBuffers,
    buffer,
    gradient_share,
    trained_elements,
    units,
)
from memcalc.phase_peaks.zero3_param_coordinator import gathered
from memcalc.phase_peaks.zero_reduce_bucket import BucketReduction, after_backward, in_backward
from memcalc.spec.zero import DEFAULT as ZERO
from memcalc.states.state_options import StateOptions
from memcalc.states.zero_offload import gradient_passage

SOURCE = "DeepSpeed 0.19 runtime/zero/"

# phases from the first micro-batch's backward to the last one's
BETWEEN = mask_of("forward_1", "loss_1", "backward_1", "forward_2", "loss_2", "backward_2")


def deepspeed(parameters: LocalParameters, options: StateOptions) -> EngineBuffers:
    """Return the reduce bucket, allocated at full size, and, at stage 3, the gathered parameters."""
    if options.zero_stage == 3:
        return _stage_3(parameters, options)
    # Frozen parameters are in no optimizer group, so they are replicated.
    trained = LocalParameters(parameter for parameter in parameters if parameter.trains)
    around = PerLayerBuffers()
    standing = list(_standing(trained, options))
    detail = "stage_1_and_2.py: setup_buckets: allocated whole at the first gradient, freed after "
    if options.accumulates and options.reduces_after_backward:
        standing.append(_bucket(options, BETWEEN, f"{detail}the last micro-batch"))
    else:
        bucket = _bucket(options, 0, f"{detail}backward")
        around = PerLayerBuffers(
            backward_head=(bucket,) if any(parameter.where == "head" for parameter in trained) else (),
            backward_layer=(bucket,),
            backward_last_layer=(bucket,),
            backward_first_layer=(bucket,),
            backward_embedding=(bucket,),
        )
    reducing = _after_backward if options.reduces_after_backward else _in_backward
    return EngineBuffers(tuple(standing), reducing(parameters, options, around))


def _stage_3(parameters: LocalParameters, options: StateOptions) -> EngineBuffers:
    """Return stage 3's buffers: the persistent bucket, and the parameters gathered around each layer."""
    bucket = _bucket(options, from_phase("optimizer"), "stage3.py: allocated whole and kept")
    largest = max(parameter.elements for parameter in parameters if parameter.trains)
    source = f"{SOURCE}stage3.py: create_reduce_and_remove_grad_hooks gathers each parameter for a moment"
    hooked = buffer("largest parameter, gathered", largest, options.compute, mask_of("optimizer"), "P_matrix", source)
    found = gathered(parameters, options.zero, recomputes=options.recomputes, detached=options.detached)
    last = _gathered(found.backward_layers[-1], options)
    first = last if len(found.backward_layers) == 1 else _gathered(found.backward_layers[0], options)
    around = PerLayerBuffers(
        forward_layer=(_gathered(found.forward_layers[-1], options),),
        forward_widest=(_gathered(found.forward_layers[found.widest_forward], options),),
        forward_head=(_gathered(found.forward_head, options),),
        loss_and_head=(_gathered(max(found.loss, found.backward_head), options),),
        backward_last_layer=(last,),
        backward_layer=(_gathered(max(found.backward_layers[1:-1], default=0), options),),
        backward_first_layer=(first,),
        backward_embedding=(_gathered(found.backward_embedding, options),),
    )
    return EngineBuffers((bucket, hooked), _in_backward(parameters, options, around, found.at_gradient))


def _in_backward(
    parameters: LocalParameters, options: StateOptions, layer_buffers: PerLayerBuffers, there: Sequence[int] = ()
) -> PerLayerBuffers:
    """Return the buffers with those of reductions during backward.

    Args:
        parameters: parameters of the stage.
        options: options of the run.
        layer_buffers: the buffers so far.
        there: elements that stage 3 has gathered when each gradient is produced.
    """
    whole = options.zero_stage == 3
    reductions = in_backward(parameters, options.data_parallel if whole else 0, options.zero.reduce_bucket_size)
    file = "stage3.py" if whole else "stage_1_and_2.py"
    detail = f"{SOURCE}{file}: reduce_independent_p_g_buckets_and_remove_grads"

    def height(each: BucketReduction) -> int:
        return each.copied + each.beside + (there[each.number] if whole else 0)

    def at(place: str) -> tuple[RowDraft, ...]:
        """Return what the largest reduction at a place flattens, and its gradients too large for the bucket."""
        most = max((each for each in reductions if each.place == place), key=height, default=None)
        if most is None:
            return ()
        found = [_gathered(there[most.number], options)] if whole and place == "layer" else []
        if most.copied:
            found.append(buffer("flattened bucket", most.copied, options.compute, 0, "P_bucket", detail))
        if most.beside:
            name = "gradient larger than the bucket"
            found.append(buffer(name, most.beside, options.compute, 0, "P_matrix", detail))
        return tuple(found)

    in_layers = at("layer")
    shares = {kind: gradient_share(size, options, SOURCE) for kind, size in units(parameters, trained_elements).items()}
    if options.offloads:  # a gradient is moved to the host as soon as it is reduced
        shares = {kind: share._replace(each=0, block=0) for kind, share in shares.items()}
    return layer_buffers._replace(
        second_of_head=at("head"),
        on_gradient=(*layer_buffers.backward_layer, *in_layers) if in_layers and not whole else in_layers,
        gradient_of_embedding=at("embedding"),
        after_embedding=(*layer_buffers.backward_embedding, *at("end")),
        layer_share={} if whole else shares,  # stage 3 has one buffer, counted with the model states
    )


def _after_backward(
    parameters: LocalParameters, options: StateOptions, layer_buffers: PerLayerBuffers
) -> PerLayerBuffers:
    """Return stage 1's buffers: after backward, unsharded gradients pass through the bucket in parameter order.

    The first rank's shard holds the first parameters, so its buffer is allocated at once.
    """
    reductions = after_backward(parameters, options.zero.reduce_bucket_size)
    own = first_rank_slice(parameters, options.data_parallel).touched
    heights = [reductions[0].copied - reductions[0].moved, own - reductions[0].moved]
    heights += (own + each.copied - each.moved for each in reductions[1:])
    detail = f"{SOURCE}stage_1_and_2.py: reduce_gradients, copy_grads_in_partition"
    name = "flattened bucket and own gradients, beyond freed memory"
    beyond = buffer(name, max(0, *heights), options.compute, 0, "P_bucket", detail)
    return layer_buffers._replace(
        after_embedding=(*layer_buffers.backward_embedding, *((beyond,) if beyond.each else ()))
    )


def _standing(parameters: LocalParameters, options: StateOptions) -> Iterator[RowDraft]:
    """Yield the persistent buffers of stages 1 and 2 for trained parameters, besides the bucket."""
    elements = sum(parameter.count * parameter.elements for parameter in parameters)
    if options.creates_masters_after_flattening or not options.offloads:
        yield _flattening(elements, options)
    if options.offloads:
        passage = gradient_passage(parameters, options, "temp_grad_buffer_for_gpu_offload")
        yield passage._replace(block=rounded(passage.each))
        share = -(-elements // options.data_parallel)
        source = f"{SOURCE}stage_1_and_2.py: step: the updated share comes back in fp32, then is cast"
        mask = mask_of("optimizer_step_1", "optimizer_step_2")
        back = buffer("updated weights from the host", share, "fp32", mask, "P/N", source)
        yield back._replace(component=Component.TEMPORARIES)
    elif options.accumulates and not options.reduces_after_backward:
        yield _wholes(parameters, options)


def _wholes(parameters: LocalParameters, options: StateOptions) -> RowDraft:
    """Return the unsharded gradients that stage 2 accumulates for parameters partly in the first rank's shard."""
    share = -(-sum(parameter.count * parameter.elements for parameter in parameters) // options.data_parallel)
    beyond = max(0, first_rank_slice(parameters, options.data_parallel).touched - share)
    source = f"{SOURCE}stage_1_and_2.py: get_all_grad_tensors(params_in_partition)"
    whole = buffer("gradients beyond the rank's shard", beyond, options.base, BETWEEN, "P_touched - P/N", source)
    return whole._replace(component=Component.GRADIENTS)


def _flattening(elements: int, options: StateOptions) -> RowDraft:
    """Return the temporary of construction: a flattened copy of the weights, or zeros as large as the masters."""
    source = f"{SOURCE}stage_1_and_2.py: __init__"
    mask = mask_of("optimizer")
    if options.creates_masters_after_flattening:
        return buffer("weights, copied into a flat buffer", elements, options.base, mask, "P", source)
    share = -(-elements // options.data_parallel)
    return buffer("zeros in the shape of the master", share, "fp32", mask, "P/N", source)


def _gathered(elements: int, options: StateOptions) -> RowDraft:
    source = f"{SOURCE}partitioned_param_coordinator.py"
    return buffer("parameters, gathered", elements, options.compute, 0, "P_gathered", source)


def _bucket(options: StateOptions, mask: int, detail: str) -> RowDraft:
    size = options.zero.reduce_bucket_size
    formula = "5e8" if size == ZERO.reduce_bucket_size else "reduce_bucket_size"
    return buffer("reduce bucket", size, options.compute, mask, formula, f"{SOURCE}{detail}")
