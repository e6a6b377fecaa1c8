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
    """Return the bytes of NCCL's buffers: one process group for each parallel dimension in which ranks communicate.

    DeepSpeed's stage 3 has two data-parallel groups: zero.Init gathers parameters in the world's group, and gradients
    are reduced in a copy of it (deepspeed 0.19 runtime/zero/partition_parameters.py, Init: ds_process_group;
    utils/groups.py, _clone_world_group). A model built without zero.Init gathers in the copy, too.
    """
    parallelism = spec.parallelism
    kinds = ("data", "tensor", "pipeline", "context", "expert")
    groups = sum(getattr(parallelism, f"{kind}_parallel") > 1 for kind in kinds)
    stage_3 = parallelism.engine == "deepspeed" and parallelism.zero_stage == 3 and parallelism.data_parallel > 1
    groups += stage_3 and spec.training.finetune != "qlora"
    return FIRST_GROUP_BYTES + (groups - 1) * FURTHER_GROUP_BYTES if groups else 0


def outside_bytes(spec: Spec, gpu: GpuSpec | None) -> int:
    """Return the bytes of the CUDA context (0 without a GPU) and of the communication library."""
    return (0 if gpu is None else gpu.context_bytes) + communication_library_bytes(spec)
