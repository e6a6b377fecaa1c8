"""Emulation of a multi-rank job by one process: PyTorch's fake process group, and fake CUDA streams.

Collectives return immediately, as if every rank had sent the same data. Buffers are allocated as in a real job, so
the rank's memory is right. Streams matter because the allocator never reuses one stream's memory for another.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import _disable_current_modes

from memcalc.tracing.cuda_functions import shown_device
from memcalc.tracing.cuda_workspaces import sharding_rules
from memcalc.tracing.norms import RMS_NORM
from memcalc.tracing.streams import Streams

# Modules in which PyTorch looks up the device module: torch.cuda for "cuda".
ASKED_IN = (
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_init",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed.fsdp._fully_shard._fsdp_state",
)


@contextmanager
def fake_streams() -> Iterator[Streams]:
    """Make PyTorch's sharding use fake streams instead of torch.cuda's."""
    streams = Streams()
    with ExitStack() as patches:
        modules: list[Any] = [importlib.import_module(name) for name in ASKED_IN]
        sharding_rules()
        for module in modules:
            original = module._get_device_handle  # noqa: SLF001 -- no public name

            def handle(device_type: str = "cuda", original: Any = original) -> Any:
                return streams if device_type == "cuda" else original(device_type)

            patches.enter_context(mock.patch.object(module, "_get_device_handle", handle))
        yield streams


@contextmanager
def unseen_propagation() -> Iterator[None]:
    """Hide DTensor's shape propagation, which runs operators on fake global tensors, from the recorder."""
    original = ShardingPropagator._propagate_tensor_meta_non_cached  # noqa: SLF001 -- no public name

    def propagate(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # noqa: SLF001 -- as above
            return original(*args, **kwargs)

    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate):
        yield


@contextmanager
def split_tensors() -> Iterator[None]:
    """Let DTensors report their local tensors' device, and shard memcalc's operators like those they replace."""
    aten, ours = torch.ops.aten, torch.ops.memcalc
    propagator = DTensor._op_dispatcher.sharding_propagator  # noqa: SLF001 -- as above
    stand_ins = {getattr(ours, name).default: getattr(aten, name).default for name in RMS_NORM if hasattr(aten, name)}
    with ExitStack() as patches:
        for rules in vars(propagator).values():
            if isinstance(rules, dict):
                added = {original: rules[its] for original, its in stand_ins.items() if its in rules}
                patches.enter_context(mock.patch.dict(rules, added))
        patches.enter_context(mock.patch.object(DTensor, "device", shown_device(DTensor), create=True))
        yield


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a job with `world_size` ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear DTensor's caches: their keys are meshes that compare equal, but have groups with new names each time."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
