"""DeepSpeed's own loop: `deepspeed.initialize` with a JSON file, over 2 or 4 ranks, or one rank of 8.

The programs of `deepspeed-stage0` are without ZeRO.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.programs.environments import HF5_DEEPSPEED
from benchmarks.programs.huggingface import CARDS, draw_batch
from benchmarks.programs.program import STEPS, Draw, Family, Program, Sized, script
from benchmarks.programs.ranks import ALONE, models_on

FILE = "ds_config.json"
PRECISIONS: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"bf16": {"enabled": True}}, "bfloat16"),
    ({"bf16": {"enabled": True}}, "float32"),
    ({"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}, "float16"),
    ({"bf16": {"enabled": True}}, "bfloat16"),
    ({}, "float32"),
)
OPTIMIZERS: tuple[Mapping[str, Any], ...] = (
    {"type": "AdamW", "params": {"lr": 2e-5, "torch_adam": True}},
    {"type": "AdamW", "params": {"lr": 2e-5, "torch_adam": True, "weight_decay": 0.1}},
)


def draw_program(draw: Draw, *, stages: Sequence[int]) -> Program:
    """A program of 2 to 8 ranks, at one of some ZeRO stages."""
    gpus = draw.of("gpus", (2, ALONE, 2, ALONE, 4))
    model = draw.of(f"model on {gpus} GPUs", models_on(gpus, large=False))
    batch = draw_batch(draw, model)
    stage = draw.of("stage", stages)
    precision, loaded = draw.of("precision", PRECISIONS)
    checkpointing = draw.of("checkpointing", (False, True, False))
    zero = {
        "stage": stage,
        "reduce_bucket_size": draw.of("bucket", (5e8, 2e8, 5e7)),
        "allgather_bucket_size": 2e8,
        "overlap_comm": draw.of("overlap", (True, False)),
        "contiguous_gradients": True,
    }
    config = {
        "train_micro_batch_size_per_gpu": batch.size,
        "gradient_accumulation_steps": draw.of("accumulation", (1, 4, 2)),
        "gradient_clipping": 1.0,
        "steps_per_print": 100,
        "optimizer": draw.of("optimizer", OPTIMIZERS),
        **precision,
        "zero_optimization": zero,
    }
    options = f"--model {model.hub_id} --dtype {loaded} --seq_length {batch.length} --deepspeed_config {FILE}"
    options += checkpointing * " --gradient_checkpointing"
    alone = gpus == ALONE
    settings = (f"preset={model.hub_id}", f"data_parallel={gpus}", f"s={batch.length}")
    return Program(
        files={FILE: json.dumps(config, indent=2) + "\n", "train.py": script("deepspeeds.py")},
        command=f"{'python' if alone else f'deepspeed --num_gpus {gpus}'} train.py {options}",
        card=draw.of("card", CARDS),
        gpus=gpus,
        sized=Sized(FILE, settings + (("recompute=full",) if checkpointing else ()), "deepspeed"),
        models=(model.hub_id,),
        data="",
        options={"random_weights": True, "steps": STEPS, **({"world_size": gpus} if alone else {})},
    )


FAMILIES = (
    Family("deepspeed", HF5_DEEPSPEED, partial(draw_program, stages=(0, 1, 2, 3, 2, 3, 1))),
    Family("deepspeed-stage0", HF5_DEEPSPEED, partial(draw_program, stages=(0,))),
)
