"""Training steps with DeepSpeed, of rank 0 of many GPUs: python zero.py STAGE WORLD_SIZE [offload].

On the fake process group, unless torchrun started it. DeepSpeed's own fused optimizer is compiled with nvcc on the
way, so PyTorch's is taken.
"""

from __future__ import annotations

import json
import os
import sys

import deepspeed
import models
import torch
import torch.distributed as dist

stage, world, offload = int(sys.argv[1]), int(sys.argv[2]), "offload" in sys.argv
kind = "gpt2" if offload else "llama"  # what is offloaded is really computed, by the host
rank = int(os.environ.get("RANK", "0"))
os.environ.setdefault("LOCAL_RANK", "0")
if "MASTER_PORT" in os.environ:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
else:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
where = {"device": "cpu", "pin_memory": True}
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": stage} | ({"offload_optimizer": where} if offload else {}),
}
deepspeed.init_distributed(dist_init_required=False)
if stage == 3:
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = models.make(kind)
else:
    model = models.make(kind)
optimizer = torch.optim.AdamW(model.parameters())
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
ids = models.tokens(kind)
for _ in range(3):
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    engine.step()
print(json.dumps({"allocated": torch.cuda.memory_allocated()}))
