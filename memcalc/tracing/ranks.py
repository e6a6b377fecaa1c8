"""Many ranks without any: PyTorch's fake process group, and CUDA streams that are none.

Collectives return at once, as if every rank had sent what this one did; buffers are real, so that what a rank holds is
what it would hold. Streams matter to the allocator, which never lends one stream's memory to another.
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

# Where PyTorch asks for the module of a kind of device: torch.cuda, for "cuda".
ASKED_IN = (
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_init",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed.fsdp._fully_shard._fsdp_state",
)


@contextmanager
def fake_streams() -> Iterator[Streams]:
    """PyTorch's sharding finds these streams in place of torch.cuda's."""
    streams = Streams()
    with ExitStack() as patches:
        modules: list[Any] = [importlib.import_module(name) for name in ASKED_IN]
        sharding_rules()
        for module in modules:
            own = module._get_device_handle  # noqa: SLF001 -- no public name

            def handle(kind: str = "cuda", own: Any = own) -> Any:
                return streams if kind == "cuda" else own(kind)

            patches.enter_context(mock.patch.object(module, "_get_device_handle", handle))
        yield streams


@contextmanager
def unseen_propagation() -> Iterator[None]:
    """DTensor finds the shape of a result by running its operator on fake tensors of the whole: no memory of ours."""
    own = ShardingPropagator._propagate_tensor_meta_non_cached  # noqa: SLF001 -- no public name

    def propagate(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # noqa: SLF001 -- likewise
            return own(*args, **kwargs)

    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate):
        yield


@contextmanager
def split_tensors() -> Iterator[None]:
    """DTensors are on the device that their parts are on, and our operators are split as those they stand for."""
    aten, ours = torch.ops.aten, torch.ops.memcalc
    propagator = DTensor._op_dispatcher.sharding_propagator  # noqa: SLF001 -- likewise
    stand_ins = {getattr(ours, name).default: getattr(aten, name).default for name in RMS_NORM if hasattr(aten, name)}
    with ExitStack() as patches:
        for rules in vars(propagator).values():
            if isinstance(rules, dict):
                added = {own: rules[its] for own, its in stand_ins.items() if its in rules}
                patches.enter_context(mock.patch.dict(rules, added))
        patches.enter_context(mock.patch.object(DTensor, "device", shown_device(DTensor), create=True))
        yield


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """This process is rank 0 of so many."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """DTensor remembers how it shared out by meshes that are equal, but whose groups have other names the next time."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
