"""One rank of many: PyTorch's own engines around the model. The other ranks are whoever the process group says."""

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
    """The model with FSDP2: every layer a unit, the rest the root's; built on meta, so that only shards ever exist."""
    parallelism = spec.parallelism
    mesh = mesh_of(spec, device)
    gathered_again = parallelism.zero_stage == 3
    model = build(spec, torch.device("meta"))
    for layer in layers_of(model.module):
        fully_shard(layer, mesh=mesh, reshard_after_forward=gathered_again)
    # PyTorch's default for the root: what backward needs first is not let go.
    fully_shard(model.module, mesh=mesh, reshard_after_forward=None if gathered_again else False)
    model.module.to_empty(device=device)
    return model


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
    """The ranks that share the model, in replicas of it if there are several (HSDP)."""
    ranks, replicas = spec.parallelism.data_parallel, spec.parallelism.data_parallel_replicate
    shape = (replicas, ranks // replicas) if replicas > 1 else (ranks,)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: the longest list of modules in it."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])
