"""Communication buffers that stay allocated over phases, and temporaries of an engine outside the passes.

What an engine allocates within forward and backward is in `memcalc.sharding`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.gradient_order import first_rank_slice
from memcalc.layout.local_parameters import LocalParameters, stage_parameters, without_companions
from memcalc.layout.schedules import uses_pipelining
from memcalc.layout.stages import Stage, is_steady
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, from_phase, mask_of
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.spec.zero import DEFAULT as ZERO
from memcalc.states import pipeline_engine, pipelining
from memcalc.states.flat_states import construction_rows
from memcalc.states.state_options import StateOptions, state_options
from memcalc.states.unsharded_weights import (
    loading_weights,
    loads_whole_weights,
    shards_loaded_model,
    unsharded_weights,
)
from memcalc.states.zero_offload import gradient_passage

SOURCE = "DeepSpeed 0.19 runtime/zero/"

# phases from the first micro-batch's backward to the last one's
BETWEEN = mask_of("forward_1", "loss_1", "backward_1", "forward_2", "loss_2", "backward_2")


def communication_buffers(spec: Spec, stage: Stage) -> list[RowDraft]:
    """Return the buffers of the run's engine on one pipeline stage."""
    options = state_options(spec)
    if options.engine == "megatron":  # main gradients are one contiguous buffer, reduced in place
        return []
    found = [*pipelining.received(spec, stage)] if uses_pipelining(spec) else []
    if spec.parallelism.has_pipeline_engine:
        found += pipeline_engine.kept_between_passes(spec, stage)
    if spec.parallelism.shards * spec.parallelism.data_parallel_replicate == 1 and not options.partitions_gradients:
        return found
    parameters = without_companions(stage_parameters(spec, stage))
    if options.engine == "fsdp1":
        return [*found, *construction_rows(parameters, options, is_loaded_whole=spec.training.finetune == "qlora")]
    if shards_loaded_model(spec):
        found.append(unsharded_weights(spec, stage))
    if loads_whole_weights(spec):
        found.append(loading_weights(spec, stage))
    if is_steady(spec, stage):  # otherwise the micro-batches that may hold most are counted one by one
        found += bucket_between_passes(options)
    return [*found, *_buffers(parameters, options)]


def bucket_between_passes(options: StateOptions) -> Iterator[RowDraft]:
    """Yield the reduce bucket that stages 1 and 2 keep from a step's first backward to its last one."""
    keeps = options.engine == "deepspeed" and options.zero_stage in (1, 2) and options.reduces_after_backward
    if keeps and options.step.accumulates:
        detail = "stage_1_and_2.py: setup_buckets: allocated whole at the first gradient, freed after "
        yield _reduce_bucket(options, BETWEEN, f"{detail}the last micro-batch")


@lru_cache(maxsize=1024)
def _buffers(parameters: LocalParameters, options: StateOptions) -> tuple[RowDraft, ...]:
    if options.engine == "fsdp2" or options.is_deepspeed_without_zero or options.sums_apart:
        return ()
    if options.engine == "deepspeed" and options.zero_stage == 3:
        return tuple(_stage_3(parameters, options))
    if options.engine == "deepspeed" and options.zero_stage >= 1:
        # Frozen parameters are in no optimizer group, so they are replicated.
        return tuple(_stages_1_and_2(LocalParameters(each for each in parameters if each.trains), options))
    return tuple(_buckets(parameters, options))


def _buckets(parameters: LocalParameters, options: StateOptions) -> Iterator[RowDraft]:
    """Yield DDP's buckets: a second copy of the gradients, live from construction on (gradient_as_bucket_view=False).

    The first backward that reduces fills one bucket with all gradients. The next forward frees it and allocates buckets
    of 25 MiB in the order in which gradients were produced; their total size is the same. Gradients are all-reduced
    inside the buckets, one bucket at a time. No bucket is freed before the optimizer step: `.grad` is another copy.
    """
    elements: dict[str, int] = {}
    for parameter in parameters:
        if parameter.trains:  # a frozen parameter is in no bucket
            dtype = parameter.dtype or options.base
            elements[dtype] = elements.get(dtype, 0) + parameter.count * parameter.elements
    for dtype, count in elements.items():
        yield _buffer("gradient buckets", count, dtype, from_phase("optimizer"), "P", "torch 2.13 c10d/reducer.cpp")


def _stage_3(parameters: LocalParameters, options: StateOptions) -> Iterator[RowDraft]:
    """Yield the reduce bucket, and the largest parameter, which the construction gathers for a moment."""
    yield _reduce_bucket(options, from_phase("optimizer"), "stage3.py: allocated whole and kept")
    largest = max(parameter.elements for parameter in parameters if parameter.trains)
    source = f"{SOURCE}stage3.py: create_reduce_and_remove_grad_hooks gathers each parameter for a moment"
    mask = mask_of("optimizer")
    yield _buffer("largest parameter, gathered", largest, options.compute, mask, "P_matrix", source)


def _stages_1_and_2(parameters: LocalParameters, options: StateOptions) -> Iterator[RowDraft]:
    """Yield the buffers of stages 1 and 2 for trained parameters, besides those within backward."""
    elements = sum(parameter.count * parameter.elements for parameter in parameters)
    if options.creates_masters_after_flattening or not options.host.offloads:
        yield _flattening(elements, options)
    if options.host.offloads:
        passage = gradient_passage(parameters, options, "temp_grad_buffer_for_gpu_offload")
        yield passage._replace(block=rounded(passage.each))
    elif options.step.accumulates and not (options.reduces_after_backward or options.sums_shards):
        yield _wholes(parameters, options)


def _wholes(parameters: LocalParameters, options: StateOptions) -> RowDraft:
    """Return the unsharded gradients that stage 2 accumulates for parameters partly in the first rank's shard."""
    share = -(-sum(parameter.count * parameter.elements for parameter in parameters) // options.data_parallel)
    beyond = max(0, first_rank_slice(parameters, options.data_parallel).touched - share)
    source = f"{SOURCE}stage_1_and_2.py: get_all_grad_tensors(params_in_partition)"
    whole = _buffer("gradients beyond the rank's shard", beyond, options.base, BETWEEN, "P_touched - P/N", source)
    return whole._replace(component=Component.GRADIENTS)


def _flattening(elements: int, options: StateOptions) -> RowDraft:
    """Return the temporary of construction: a flattened copy of the weights, or zeros as large as the masters."""
    source = f"{SOURCE}stage_1_and_2.py: __init__"
    mask = mask_of("optimizer")
    if options.creates_masters_after_flattening:
        return _buffer("weights, copied into a flat buffer", elements, options.base, mask, "P", source)
    share = -(-elements // options.data_parallel)
    return _buffer("zeros in the shape of the master", share, "fp32", mask, "P/N", source)


def _reduce_bucket(options: StateOptions, mask: int, detail: str) -> RowDraft:
    size = options.zero.reduce_bucket_size
    formula = "5e8" if size == ZERO.reduce_bucket_size else "reduce_bucket_size"
    if options.has_two_buckets:
        return _buffer("reduce buckets", 2 * size, options.compute, mask, f"2·{formula}", f"{SOURCE}{detail}")
    return _buffer("reduce bucket", size, options.compute, mask, formula, f"{SOURCE}{detail}")


def _buffer(name: str, elements: int, dtype: str, mask: int, symbol: str, citation: str) -> RowDraft:
    each = elements * DTYPE_BYTES[dtype]
    formula = f"{DTYPE_BYTES[dtype]}·{symbol}"
    component = Component.COMMUNICATION_BUFFERS
    return RowDraft(component, "engine", name, (elements,), dtype, 1, each, rounded(each), mask, formula, citation)
