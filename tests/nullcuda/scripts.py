"""Scripts that several tests run on the null device, and what runs them."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.nullcuda import DryRun

Script = Callable[..., DryRun]

# Everyday DDP: one rank of however many there are; at the end `words` is what every rank has said.
TWO_STEPS_OF_DDP = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4096, 4096, bias=False).cuda())
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.randn(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
words = [None] * dist.get_world_size()
dist.all_gather_object(words, {"rank": dist.get_rank()})
"""
