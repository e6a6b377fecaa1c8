"""One rank of a multi-rank job, with PyTorch's own engines; the process group provides the other ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from memcalc.errors import InputError
from memcalc.spec.fsdp import FsdpSpec
from memcalc.spec.spec import Spec
from memcalc.spec.training import TOKENWISE
from memcalc.step.causal_lm import CausalLM, build
from memcalc.step.dtypes import DTYPES
from memcalc.step.host import HOST


def build_sharded(spec: Spec, device: torch.device) -> CausalLM:
    """Return the model, distributed over ranks before it has memory: by DTensor within layers, then by FSDP2.

    Raises:
        InputError: the loss reads the LM head's weight outside of the module that gathers it.
    """
    if spec.training.loss in TOKENWISE and spec.parallelism.data_parallel > 1:
        raise InputError(
            f"loss = {spec.training.loss} reads the LM head while FSDP2 has it sharded, so such a step cannot run.",
            "Set loss: materialized, or use `memcalc estimate`.",
            "training.loss",
        )
    mesh = mesh_of(spec, device)
    quantized = spec.training.finetune == "qlora"  # quantization runs kernels, so it needs a device
    model = build(spec, device, place=torch.device("meta"))
    if spec.parallelism.tensor_parallel > 1:
        from memcalc.step.reference.tensor_parallel import split_over

        model = split_over(model, spec, mesh["tensor"])
    if spec.parallelism.data_parallel > 1:
        _shard(_called(model.module), spec, mesh)
    if not quantized:
        _give_memory(model.module, spec, device)
    return model


def _called(module: nn.Module) -> nn.Module:
    """Return the module that is called: PEFT wraps it, while the adapters are inside."""
    inside = getattr(module, "get_base_model", None)
    return module if inside is None else inside()


def _shard(module: nn.Module, spec: Spec, mesh: DeviceMesh) -> None:
    """Apply FSDP2: every layer is a unit; the rest belongs to the root, unless embedding and LM head are units."""
    parallelism = spec.parallelism
    ranks = mesh["replicate", "shard"] if parallelism.data_parallel_replicate > 1 else mesh["shard"]
    gathered_again = parallelism.zero_stage == 3
    policy = CPUOffloadPolicy(parallelism.offload_pin_memory) if parallelism.weights_on_host else OffloadPolicy()
    wrap = partial(fully_shard, mesh=ranks, offload_policy=policy, mp_policy=mixed_precision(parallelism.fsdp))
    for layer in layers_of(module):
        wrap(layer, reshard_after_forward=gathered_again)
    if parallelism.fsdp.wrap == "layers-and-ends" and not spec.model.tie_word_embeddings:
        embedding, *tail = _ends(module)
        wrap(embedding, reshard_after_forward=gathered_again)
        wrap(tail, reshard_after_forward=False)
    # PyTorch's default for the root: it is not resharded after forward, because backward needs it first.
    wrap(module, reshard_after_forward=None if gathered_again else False)


def reduce_gradients(model: CausalLM, *, reduces: bool) -> None:
    """Set whether the next backward of an FSDP2 model reduces its gradients."""
    module = _called(model.module)
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(reduces)


def mixed_precision(fsdp: FsdpSpec) -> MixedPrecisionPolicy:
    """Return the mixed-precision policy in PyTorch's dtypes."""
    param, reduce, output = (
        None if dtype is None else DTYPES[dtype] for dtype in (fsdp.param_dtype, fsdp.reduce_dtype, fsdp.output_dtype)
    )
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)


def _ends(module: nn.Module) -> list[nn.Module]:
    """Return the embedding, the final norm if there is one, and the LM head; in transformers models as Accelerate does.

    Source: Accelerate 1.15 utils/fsdp_utils.py, fsdp2_prepare_model and _find_final_norm.
    """
    if not hasattr(module, "get_input_embeddings"):
        found = [getattr(module, name, None) for name in ("embed_tokens", "norm", "lm_head")]
        return [each for each in found if each is not None]
    model: Any = module
    base = getattr(model, model.base_model_prefix)
    norms = [child for child in base.children() if "Norm" in type(child).__name__]
    return [model.get_input_embeddings(), *norms[-1:], model.get_output_embeddings()]


def _give_memory(module: nn.Module, spec: Spec, device: torch.device) -> None:
    """Allocate a module on the device, or its parameters in host memory if they are offloaded."""
    if not spec.parallelism.weights_on_host:
        module.to_empty(device=device)
        return
    module.to_empty(device=HOST)
    for part in module.modules():  # the offload policy excludes buffers: forward reads them on the device
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty_like(buffer, device=device))


def replicated(model: CausalLM, device: torch.device) -> CausalLM:
    """Return the model in DistributedDataParallel with default settings."""
    number = [device.index or 0] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model.module, device_ids=number)
    if dist.get_backend() == "fake":  # the fake backend's all-reduce returns nothing, which the reducer does not accept
        wrapped.register_comm_hook(None, noop_hook)

    def logits(input_ids: Tensor) -> Tensor:
        found = wrapped(input_ids)
        return found if isinstance(found, Tensor) else found.logits

    return replace(model, logits=logits)


def mesh_of(spec: Spec, device: torch.device) -> DeviceMesh:
    """Return the device mesh: replicas (HSDP), then shards, then tensor-parallel ranks, which are adjacent."""
    parallelism = spec.parallelism
    replicas, ranks = parallelism.data_parallel_replicate, parallelism.data_parallel
    extents = {"replicate": replicas} if replicas > 1 else {}
    extents |= {"shard": ranks // replicas} if ranks > 1 else {}
    extents |= {"tensor": parallelism.tensor_parallel} if parallelism.tensor_parallel > 1 else {}
    return init_device_mesh(device.type, tuple(extents.values()), mesh_dim_names=tuple(extents))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: the ModuleList with the most parameters, the outermost among equals."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda each: sum(p.numel() for p in each.parameters()), default=()))
