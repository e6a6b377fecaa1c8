"""Device memory outside PyTorch's allocator, from published defaults: CUDA context and communication library."""

from __future__ import annotations

from memcalc.layout.schedules import VOTES_SINCE
from memcalc.layout.stages import Stage, stages_of
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.spec import Spec

MIB = 2**20

# NCCL's buffers, planning defaults from published process figures: 1.0 to 1.5 GiB for the first group of 8 GPUs (NCCL
# src/init.cc computeBuffSizes; ML Engineering book), 0.5 to 2 GiB for each further group (NCCL issue 864). Estimates
# use the upper ends, lower bounds the lower ends.
FIRST_GROUP_BYTES = 1536 * MIB
FURTHER_GROUP_BYTES = 2048 * MIB
LEAST_FIRST_GROUP_BYTES = 1024 * MIB
LEAST_FURTHER_GROUP_BYTES = 512 * MIB


def communication_library_bytes(spec: Spec, stage: Stage | None = None) -> int:
    """Return the most bytes that NCCL's buffers have, by published figures; each communicator has its own.

    Args:
        spec: the run.
        stage: the pipeline stage of the rank; None: the one with the most communicators.
    """
    further = _most_communicators(spec, stage) - 1
    return FIRST_GROUP_BYTES + further * FURTHER_GROUP_BYTES if further >= 0 else 0


def least_communication_library_bytes(spec: Spec, stage: Stage | None = None) -> int:
    """Return the least bytes that NCCL's buffers have; arguments as for `communication_library_bytes`."""
    further = _most_communicators(spec, stage) - 1
    return LEAST_FIRST_GROUP_BYTES + further * LEAST_FURTHER_GROUP_BYTES if further >= 0 else 0


def _most_communicators(spec: Spec, stage: Stage | None) -> int:
    return max(_communicators(spec, each) for each in (stages_of(spec) if stage is None else (stage,)))


def _communicators(spec: Spec, stage: Stage) -> int:
    """Return the number of communicators of a rank: one for each parallel dimension in which ranks communicate.

    Data-parallel replicas of shards (HSDP) are a dimension in addition to the shards. DeepSpeed reduces gradients in a
    copy of the world's group, a group of its own (deepspeed 0.19 utils/groups.py, _clone_world_group). It binds the
    world's to a device, so that PyTorch connects it at once (comm/torch.py, init_process_group: device_id). memcalc's
    own step makes it without a device, and only zero.Init, at stage 3, then gathers in it.
    """
    parallelism, training = spec.parallelism, spec.training
    if training.framework == "torchtitan":
        return _of_torchtitan(spec, stage)
    if "megatron" in (training.framework, parallelism.engine):
        return _of_megatron(spec, stage)
    if parallelism.has_pipeline_engine:
        return _of_pipeline_engine(spec, stage)
    replicas, context = parallelism.data_parallel_replicate, parallelism.context_parallel
    degrees = (replicas, parallelism.tensor_parallel, parallelism.pipeline_parallel, parallelism.expert_parallel)
    shards = parallelism.data_parallel // replicas
    groups = sum(degree > 1 for degree in (*degrees, shards, context))
    if parallelism.engine == "deepspeed" and parallelism.data_parallel > 1:
        gathers = parallelism.zero_stage == 3 and training.finetune != "qlora"
        groups += int(training.framework is not None or gathers)
    return groups


def _of_torchtitan(spec: Spec, stage: Stage) -> int:
    """Return the communicators of a rank of torchtitan.

    It has a group for each dimension of its meshes that is not the world, and the world's: batches and losses are
    dimensions of their own, and with expert parallelism the shards and the slices of experts (torchtitan 0.2.2
    torchtitan/distributed/parallel_dims.py, build_mesh). Since torch 2.13 pipeline stages vote with their neighbors
    before the first step (distributed/pipelining/schedules.py, _warmup_p2p): NCCL connects each pair apart.
    """
    parallelism = spec.parallelism
    batches, context, stages = parallelism.data_parallel, parallelism.context_parallel, parallelism.pipeline_parallel
    degrees = (parallelism.data_parallel_replicate, parallelism.tensor_parallel, stages, parallelism.expert_parallel)
    meshes = [*degrees, parallelism.shards, context, batches, batches * context]
    if parallelism.expert_parallel > 1:
        meshes += [parallelism.expert_shards, parallelism.expert_width_ranks]
    groups = sum(1 < size < parallelism.ranks for size in meshes) + int(parallelism.ranks > 1)
    if spec.training.torch < VOTES_SINCE:
        return groups
    ends = (stage.has_embedding, stage.has_head) if len(stage.chunks) == 1 else (False, False)
    return groups + min(2 - sum(ends), stages - 1)  # stages of several chunks are neighbors in a ring


def _of_megatron(spec: Spec, stage: Stage) -> int:
    """Return the communicators of a rank of Megatron-LM's training loop.

    Beside those of its dimensions: the world's, that of the model-parallel ranks, which agree on the gradient norm, and
    that of the ranks of a distributed optimizer; the first and the last stage reduce the gradient of a tied embedding
    (core_r0.14 megatron/core/parallel_state.py, initialize_model_parallel).
    """
    parallelism = spec.parallelism
    stages, tensor = parallelism.pipeline_parallel, parallelism.tensor_parallel
    dimensions = (parallelism.data_parallel, stages, tensor, parallelism.context_parallel, parallelism.expert_parallel)
    others = (parallelism.ranks, stages * tensor, parallelism.ranks if parallelism.zero_stage else 1)
    ends = stages > 1 and spec.model.tie_word_embeddings and (stage.has_embedding or stage.has_head)
    return sum(size > 1 for size in (*dimensions, *others)) + int(ends)


def _of_pipeline_engine(spec: Spec, stage: Stage) -> int:
    """Return the communicators of a rank of DeepSpeed's pipeline engine.

    The world's and its copy; those of data and tensor parallelism; one with each of two neighbors in a ring; and that
    of the first and the last stage, which have a tied embedding (deepspeed 0.19 runtime/pipe/topology.py,
    PipelineParallelGrid: _build_p2p_groups; pipe/module.py, _index_tied_modules).
    """
    parallelism = spec.parallelism
    if parallelism.ranks == 1:
        return 0
    dimensions = (parallelism.data_parallel, parallelism.tensor_parallel)
    neighbors = 2 * int(parallelism.pipeline_parallel > 1)
    ends = neighbors and spec.model.tie_word_embeddings and (stage.has_embedding or stage.has_head)
    return 2 + sum(size > 1 for size in dimensions) + neighbors + int(bool(ends))


def outside_bytes(spec: Spec, gpu: GpuSpec | None, stage: Stage | None = None) -> int:
    """Return the bytes of the CUDA context (0 without a GPU) and the most of the communication library.

    Args:
        spec: the run.
        gpu: its GPU.
        stage: as for `communication_library_bytes`.
    """
    return (0 if gpu is None else gpu.context_bytes) + communication_library_bytes(spec, stage)


def least_outside_bytes(spec: Spec, gpu: GpuSpec | None, stage: Stage | None = None) -> int:
    """Return the bytes of the CUDA context and the least of the communication library; see `outside_bytes`."""
    return (0 if gpu is None else gpu.context_bytes) + least_communication_library_bytes(spec, stage)
