"""One rank of many: PyTorch's own engines in and around the model. The process group says who the others are."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from memcalc.spec.spec import Spec
from memcalc.step.causal_lm import CausalLM, build


def build_sharded(spec: Spec, device: torch.device) -> CausalLM:
    """The model, split over ranks before it has any memory: by DTensor within layers, then by FSDP2 as a whole."""
    mesh = mesh_of(spec, device)
    model = build(spec, torch.device("meta"))
    if spec.parallelism.tensor_parallel > 1:
        from memcalc.step.tensor_parallel import split_over

        model = split_over(model, spec, mesh["tensor"])
    if spec.parallelism.data_parallel > 1:
        _shard(model.module, spec, mesh)
    model.module.to_empty(device=device)
    return model


def _shard(module: nn.Module, spec: Spec, mesh: DeviceMesh) -> None:
    """FSDP2: every layer a unit, the rest the root's."""
    ranks = mesh["replicate", "shard"] if spec.parallelism.data_parallel_replicate > 1 else mesh["shard"]
    gathered_again = spec.parallelism.zero_stage == 3
    for layer in layers_of(module):
        fully_shard(layer, mesh=ranks, reshard_after_forward=gathered_again)
    # PyTorch's default for the root: what backward needs first is not let go.
    fully_shard(module, mesh=ranks, reshard_after_forward=None if gathered_again else False)


def replicated(model: CausalLM, device: torch.device) -> CausalLM:
    """The model in DistributedDataParallel with its defaults."""
    number = [device.index or 0] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model.module, device_ids=number)
    if dist.get_backend() == "fake":  # its all-reduce returns nothing, which the reducer does not take
        wrapped.register_comm_hook(None, noop_hook)

    def logits(input_ids: Tensor) -> Tensor:
        found = wrapped(input_ids)
        return found if isinstance(found, Tensor) else found.logits

    return replace(model, logits=logits)


def mesh_of(spec: Spec, device: torch.device) -> DeviceMesh:
    """The ranks: replicas of the model (HSDP), those that share one, and those that split its layers, neighbours."""
    parallelism = spec.parallelism
    replicas, ranks = parallelism.data_parallel_replicate, parallelism.data_parallel
    extents = {"replicate": replicas} if replicas > 1 else {}
    extents |= {"shard": ranks // replicas} if ranks > 1 else {}
    extents |= {"tensor": parallelism.tensor_parallel} if parallelism.tensor_parallel > 1 else {}
    return init_device_mesh(device.type, tuple(extents.values()), mesh_dim_names=tuple(extents))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: the longest list of modules in it."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])
