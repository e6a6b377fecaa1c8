"""TRL's SFT and DPO with DeepSpeed ZeRO 2 or 3 on 2 to 4 GPUs: `deepspeed: ds_config.json` in the YAML they read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.programs.environments import HF5_DEEPSPEED
from benchmarks.programs.huggingface import CARDS, Batch, draw_batch
from benchmarks.programs.models import SMALL
from benchmarks.programs.program import STEPS, Draw, Family, Program, Sized, written_yaml
from benchmarks.programs.trl import FILE, fields_of
from benchmarks.programs.zeros import CONFIG, GPUS, MOST_BILLIONS, draw_config

MODELS = (*SMALL[:7], *SMALL[8:])
LOSSES: Mapping[str, tuple[Any, ...]] = {
    "sft": (None, "chunked_nll", None, "nll"),
    "dpo": (None, ["ipo"], None, ["sigmoid"]),
}


def draw_program(draw: Draw, command: str) -> Program:
    """A program of 2 to 4 ranks, all of which run."""
    config = draw_config(draw)
    adapters = draw.of("adapters", ("full", "lora", "full", "full"))
    gpus = draw.of("gpus", GPUS)
    model = draw.of(f"model on {gpus} GPUs", [model for model in MODELS if model.billions * gpus <= MOST_BILLIONS])
    batch = draw_batch(draw, model)
    if command == "dpo":
        batch = Batch(max(1, batch.size // 2), batch.length)
    fields = {
        "model_name_or_path": model.hub_id,
        "max_length": batch.length,
        "packing": draw.of("packing", (None, None, True)) if command == "sft" else None,
        "loss_type": draw.of("loss", LOSSES[command]),
        **fields_of(draw, batch, adapters),
        **draw.of("weights", ({}, {"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "bfloat16"})),
        "bf16": True,
        "optim": draw.of("optimizer of Trainer", (None, "adamw_torch", None, "adamw_torch_fused")),
        "gradient_accumulation_steps": draw.of("micro-batches", (1, 4)),
        "deepspeed": CONFIG,
    }
    return Program(
        files={FILE: written_yaml(fields), CONFIG: json.dumps(config, indent=2) + "\n"},
        command=f"torchrun --nproc_per_node {gpus} -m trl.scripts.{command} --config {FILE}",
        card=draw.of("card", CARDS),
        gpus=gpus,
        sized=Sized(FILE, (f"data_parallel={gpus}",), command),
        models=(model.hub_id,),
        data="pairs" if command == "dpo" else draw.of("data", ("texts", "mixed", "texts")),
        options={"random_weights": True, "steps": STEPS},
    )


FAMILIES = (
    Family("trl-sft-zero", HF5_DEEPSPEED, partial(draw_program, command="sft")),
    Family("trl-dpo-zero", HF5_DEEPSPEED, partial(draw_program, command="dpo")),
)
