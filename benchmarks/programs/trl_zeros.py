"""TRL's SFT, DPO and GRPO with DeepSpeed ZeRO on 2 to 4 GPUs: `deepspeed: ds_config.json` in the YAML they read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.programs.data import PROMPT
from benchmarks.programs.environments import HF5_DEEPSPEED
from benchmarks.programs.huggingface import CARDS, Batch, draw_batch
from benchmarks.programs.models import SMALL
from benchmarks.programs.program import STEPS, Draw, Family, Program, Sized, written_yaml
from benchmarks.programs.trl import FILE, REWARD, fields_of
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


def draw_completions(draw: Draw) -> Program:
    """Completions of transformers' generation, with ZeRO 2 or without ZeRO, on 2 to 4 ranks."""
    config = draw_config(draw, (2, 2, 0))
    adapters = draw.of("adapters", ("full", "lora", "full"))
    gpus = draw.of("gpus", GPUS)
    model = draw.of(f"model on {gpus} GPUs", [model for model in MODELS if model.billions * gpus <= MOST_BILLIONS])
    generations, length = draw.of("generations", (4, 8, 4)), draw.of("completion", (64, 128, 64))
    fields = {
        "model_name_or_path": model.hub_id,
        "reward_funcs": ["rewards.reward_length"],
        "num_generations": generations,
        "max_completion_length": length,
        "beta": draw.of("beta", (None, 0.04, 0.0)),
        **fields_of(draw, Batch(generations, length), adapters),
        **draw.of("weights", ({"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "bfloat16"})),
        "bf16": True,
        "optim": draw.of("optimizer of Trainer", (None, "adamw_torch", None, "adamw_torch_fused")),
        "gradient_accumulation_steps": draw.of("micro-batches", (1, 2)),
        "eval_strategy": "no",
        "eval_steps": None,
        "per_device_eval_batch_size": None,
        "deepspeed": CONFIG,
    }
    return Program(
        files={FILE: written_yaml(fields), CONFIG: json.dumps(config, indent=2) + "\n", "rewards.py": REWARD},
        command=f"torchrun --nproc_per_node {gpus} -m trl.scripts.grpo --config {FILE}",
        card=draw.of("card", CARDS),
        gpus=gpus,
        sized=Sized(FILE, (f"data_parallel={gpus}", f"sequence_length={PROMPT + length}"), "grpo"),
        models=(model.hub_id,),
        data="prompts",
        options={"random_weights": True, "steps": STEPS},
    )


FAMILIES = (
    Family("trl-sft-zero", HF5_DEEPSPEED, partial(draw_program, command="sft")),
    Family("trl-dpo-zero", HF5_DEEPSPEED, partial(draw_program, command="dpo")),
    Family("trl-grpo-zero", HF5_DEEPSPEED, draw_completions),
)
