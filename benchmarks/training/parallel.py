"""Training steps of rank 0 of many GPUs: python parallel.py METHOD WORLD_SIZE.

The process group is PyTorch's fake one, unless torchrun or --world-size give another: DDP needs that, since its reducer
wants results that the fake group does not give. Last, the bytes of this rank's parameters,
gradients and optimizer state are printed.
"""

from __future__ import annotations

import json
import os
import sys

import models
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

method, world = sys.argv[1], int(sys.argv[2])
kind = "wide" if (method, world) == ("tp", 64) else "llama"  # a head a rank at least
if "LOCAL_RANK" in os.environ:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
else:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
assert dist.get_world_size() == world

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(model: torch.nn.Module, mesh: object) -> None:
    """FSDP2 (over one dimension) or HSDP (over two): each block by itself, then the rest."""
    for block in models.blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def split_tensors(model: torch.nn.Module, mesh: object) -> None:
    """Tensor parallelism by DTensor, Megatron's way: the first of two products by columns, the second by rows."""
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    for block in models.blocks(model):
        parallelize_module(block, mesh, plan)


def local(tensor: torch.Tensor) -> int:
    """Bytes on this rank."""
    mine = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return mine.nbytes


if method == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(models.make(kind), gradient_as_bucket_view=True)
elif method in {"fsdp2", "hsdp"}:
    model = models.make(kind, torch.float32, "meta")
    shape = (world,) if method == "fsdp2" else (world // 2, 2)
    shard(model, init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
    model.to_empty(device="cuda")
elif method == "tp":
    model = models.make(kind, device="meta" if kind == "wide" else "cuda")
    split_tensors(model, init_device_mesh("cuda", (world,)))
    model.to_empty(device="cuda")
else:
    raise SystemExit(f"no method {method!r}")
optimizer = torch.optim.AdamW(model.parameters(), foreach=method != "tp")  # with TP some are DTensors, some are not
ids = models.tokens(kind)
for _ in range(3):
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    states = {
        "parameters": sum(local(p) for p in model.parameters()),
        "gradients": sum(local(p.grad) for p in model.parameters() if p.grad is not None),
        "optimizer": sum(local(value) for s in optimizer.state.values() for key, value in s.items() if key != "step"),
    }
    optimizer.zero_grad()
print(json.dumps(states))
dist.destroy_process_group()
