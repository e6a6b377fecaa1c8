"""Training steps of a pipeline: torchrun --nproc-per-node N pipeline.py SCHEDULE.

Stages tell each other the shapes of what they pass on, so all of them are there. They are equal parts of a stack of 128
feed-forward blocks of 2,048; two micro-batches of 1 x 2,048 a stage.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

rank, local, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
LAYERS, WIDTH, TOKENS, MICRO_BATCHES = 128, 2048, 2048, 2 * world
torch.cuda.set_device(local)
dist.init_process_group("nccl")
kind = getattr(schedules, f"Schedule{sys.argv[1]}")
several = issubclass(kind, schedules.PipelineScheduleMulti)
chunks = 2 if several else 1
turned = sys.argv[1] in {"ZBVZeroBubble", "DualPipeV"}  # the second part of each rank counts from the end
torch.set_default_device("cuda")


def part() -> torch.nn.Module:
    """One stage's layers."""
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS // world // chunks)
    ]
    return torch.nn.Sequential(*layers)


example = torch.empty(1, TOKENS, WIDTH, device="meta", requires_grad=True)  # what stages pass on has gradients
stages = [
    PipelineStage(part(), place, world * chunks, torch.device("cuda", local), input_args=example, output_args=example)
    for place in [rank, 2 * world - 1 - rank if turned else rank + world][:chunks]
]
loss = torch.nn.functional.mse_loss
schedule = kind(stages if several else stages[0], MICRO_BATCHES, loss_fn=loss)
optimizer = torch.optim.AdamW([p for stage in stages for p in stage.submod.parameters()])
whole = torch.randn(MICRO_BATCHES, TOKENS, WIDTH)
last = any(stage.is_last for stage in stages)
for _ in range(2):
    arguments = (whole,) if any(stage.is_first for stage in stages) else ()
    schedule.step(*arguments, **({"target": whole} if last else {}))
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps({"parameters": sum(p.nbytes for stage in stages for p in stage.submod.parameters())}))
