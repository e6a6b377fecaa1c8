"""One rank of FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel), wrapped as Accelerate wraps a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, size_based_auto_wrap_policy

from memcalc.errors import InputError
from memcalc.spec.fsdp import FsdpSpec
from memcalc.spec.spec import Spec
from memcalc.spec.training import TOKENWISE
from memcalc.step.causal_lm import CausalLM, build
from memcalc.step.dtypes import DTYPES
from memcalc.step.ranks import layers_of, mesh_of

_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


def build_fsdp1(spec: Spec, device: torch.device) -> CausalLM:
    """Return the model, built in host memory; each unit moves to the device and is sharded there (`device_id`).

    Raises:
        InputError: the loss reads the LM head's weight outside of the module that gathers it, or there is no GPU.
    """
    if spec.training.loss in TOKENWISE:
        raise InputError(
            f"loss = {spec.training.loss} reads the LM head while FSDP1 has it sharded, so such a step cannot run.",
            "Set loss: materialized, or use `memcalc estimate`.",
            "training.loss",
        )
    if device.type == "cpu":
        raise InputError(
            "engine = fsdp1 runs on GPUs only.", "Use `memcalc estimate`, or engine: fsdp2.", "parallelism.engine"
        )
    model = build(spec, device, place=torch.device("meta"))
    _give_host_memory(model.module)
    fsdp, hybrid = spec.parallelism.fsdp, spec.parallelism.data_parallel_replicate > 1
    strategies = {
        (3, False): ShardingStrategy.FULL_SHARD,
        (2, False): ShardingStrategy.SHARD_GRAD_OP,
        (3, True): ShardingStrategy.HYBRID_SHARD,
        (2, True): ShardingStrategy._HYBRID_SHARD_ZERO2,  # noqa: SLF001 -- its only name
    }
    wrapped_apart = set() if fsdp.wrap == "model" else {id(layer) for layer in layers_of(model.module)}
    if fsdp.wrap == "layers-and-trained":
        wrapped_apart |= {id(module) for module in _trained_modules(model.module)}
    policy: Any = CustomPolicy(lambda module: id(module) in wrapped_apart)
    if fsdp.wrap == "size":
        policy = partial(size_based_auto_wrap_policy, min_num_params=fsdp.least_unit_parameters)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # FSDP1 is deprecated
        wrapped = FullyShardedDataParallel(
            model.module,
            sharding_strategy=strategies[spec.parallelism.zero_stage, hybrid],
            auto_wrap_policy=policy,
            backward_prefetch=_PREFETCH[fsdp.backward_prefetch],
            forward_prefetch=fsdp.forward_prefetch,
            mixed_precision=_precision(fsdp),
            device_id=device,
            use_orig_params=fsdp.use_orig_params,
            device_mesh=mesh_of(spec, device)["replicate", "shard"] if hybrid else None,
        )
    given = model.logits

    def logits(inputs: Any) -> Any:
        if not isinstance(inputs, Tensor):
            return given(inputs)
        found = wrapped(inputs)
        return found if isinstance(found, Tensor) else found.logits

    return replace(model, module=wrapped, logits=logits)


def _trained_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules without submodules that have a weight with a gradient (peft 0.21 utils/other.py)."""
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if weight is not None and weight.requires_grad and not [*part.children()]:
            yield part


def _give_host_memory(module: nn.Module) -> None:
    """Allocate a module in host memory; names that shared a tensor share it again."""
    shared: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        own = part.named_parameters, part.named_buffers
        for name, tensor in (pair for named in own for pair in named(recurse=False, remove_duplicate=False)):
            shared.setdefault(tensor, []).append((part, name))
    module.to_empty(device=torch.device("cpu"))
    for (first, first_name), *others in shared.values():
        for part, name in others:
            setattr(part, name, getattr(first, first_name))


def reduce_gradients(model: CausalLM, *, reduces: bool) -> None:
    """Set whether the next backward reduces its gradients, as `FullyShardedDataParallel.no_sync` does."""
    for unit in FullyShardedDataParallel.fsdp_modules(model.module):
        unit._sync_gradients = reduces  # type: ignore[assignment]  # noqa: SLF001 -- the flag that no_sync sets


def _precision(fsdp: FsdpSpec) -> MixedPrecision | None:
    """Return the mixed-precision policy in PyTorch's dtypes, with the buffers in the compute dtype."""
    if fsdp.param_dtype is None and fsdp.reduce_dtype is None:
        return None
    param, reduce = (None if dtype is None else DTYPES[dtype] for dtype in (fsdp.param_dtype, fsdp.reduce_dtype))
    return MixedPrecision(param_dtype=param, reduce_dtype=reduce, buffer_dtype=param)
