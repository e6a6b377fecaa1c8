"""Device memory outside PyTorch's allocator, from published defaults: CUDA context and communication library."""

from __future__ import annotations

from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.spec import Spec

MIB = 2**20

# NCCL's buffers, planning defaults from published process figures: 1.0 to 1.5 GiB for the first group of 8 GPUs (NCCL
# src/init.cc computeBuffSizes; ML Engineering book), 0.5 to 2 GiB for each further group (NCCL issue 864). The upper
# ends are used.
FIRST_GROUP_BYTES = 1536 * MIB
FURTHER_GROUP_BYTES = 2048 * MIB


def communication_library_bytes(spec: Spec) -> int:
    """Return the bytes of NCCL's buffers, which each process group has."""
    groups = _process_groups(spec)
    return FIRST_GROUP_BYTES + (groups - 1) * FURTHER_GROUP_BYTES if groups else 0


def _process_groups(spec: Spec) -> int:
    """Return the number of process groups: one for each parallel dimension in which ranks communicate.

    Data-parallel replicas of shards (HSDP) are a dimension in addition to the shards. DeepSpeed reduces gradients in a
    copy of the world's group, a group of its own (deepspeed 0.19 utils/groups.py, _clone_world_group). It binds the
    world's to a device, so that PyTorch connects it at once (comm/torch.py, init_process_group: device_id). memcalc's
    own step makes it without a device, and only zero.Init, at stage 3, then gathers in it.

    torchtitan has a group for each dimension of its meshes that is not the world, and the world's: batches and losses
    are dimensions of their own, and with expert parallelism the shards and the slices of experts (torchtitan 0.2.2
    torchtitan/distributed/parallel_dims.py, build_mesh).
    """
    parallelism = spec.parallelism
    replicas, context = parallelism.data_parallel_replicate, parallelism.context_parallel
    degrees = (replicas, parallelism.tensor_parallel, parallelism.pipeline_parallel, parallelism.expert_parallel)
    if spec.training.framework == "torchtitan":
        batches = parallelism.data_parallel
        meshes: tuple[int, ...] = (*degrees, parallelism.shards, context, batches, batches * context)
        if parallelism.expert_parallel > 1:
            meshes += (parallelism.expert_shards, parallelism.expert_width_ranks)
        return sum(1 < size < parallelism.ranks for size in meshes) + int(parallelism.ranks > 1)
    shards = parallelism.data_parallel // replicas
    groups = sum(degree > 1 for degree in (*degrees, shards, context))
    if parallelism.engine == "deepspeed" and parallelism.data_parallel > 1:
        gathers = parallelism.zero_stage == 3 and spec.training.finetune != "qlora"
        groups += int(spec.training.framework is not None or gathers)
    return groups


def outside_bytes(spec: Spec, gpu: GpuSpec | None) -> int:
    """Return the bytes of the CUDA context (0 without a GPU) and of the communication library."""
    return (0 if gpu is None else gpu.context_bytes) + communication_library_bytes(spec)
