"""LLaMA-Factory: `llamafactory-cli train FILE`, on one GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.programs.environments import FACTORY
from benchmarks.programs.huggingface import ADAPTERS, CARDS, draw_batch, draw_model
from benchmarks.programs.program import Draw, Family, Program, Sized, written_yaml

FILE = "config.yaml"
PRECISIONS: tuple[Mapping[str, Any], ...] = (
    {"bf16": True},
    {"bf16": True},
    {"pure_bf16": True},
    {"bf16": True},
    {"fp16": True},
)


def draw_program(draw: Draw) -> Program:
    """A program on one GPU."""
    adapters = draw.of("adapters", ADAPTERS)
    model = draw_model(draw, adapters)
    batch = draw_batch(draw, model)
    fields: dict[str, Any] = {
        "model_name_or_path": model.hub_id,
        **({"quantization_bit": 4, "quantization_method": "bnb"} if adapters == "qlora" else {}),
        "stage": draw.of("stage", ("sft", "sft", "pt", "sft")),
        "do_train": True,
        "finetuning_type": "full" if adapters == "full" else "lora",
        **({"lora_rank": draw.of("rank", (8, 16)), "lora_target": "all"} if adapters != "full" else {}),
        "dataset_dir": "datasets",
        "dataset": "alpaca_demo",
        "template": "default",
        "cutoff_len": batch.length,
        "packing": draw.of("packing", (None, None, True)),
        "preprocessing_num_workers": 1,
        "dataloader_num_workers": 0,
        "disable_gradient_checkpointing": draw.of("checkpointing", (None, None, True)),
        "output_dir": "out",
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "per_device_train_batch_size": batch.size,
        "gradient_accumulation_steps": draw.of("accumulation", (1, 2, 4)),
        "learning_rate": 1e-4,
        "num_train_epochs": 3.0,
        "lr_scheduler_type": "cosine",
        "optim": draw.of("optimizer", (None, None, "adamw_torch", "adamw_8bit")),
        **({"bf16": True} if adapters == "qlora" else draw.of("precision", PRECISIONS)),
    }
    return Program(
        files={FILE: written_yaml(fields), "datasets/dataset_info.json": json.dumps(described_data(fields["stage"]))},
        command=f"llamafactory-cli train {FILE}",
        card=draw.of("card", CARDS),
        sized=Sized(FILE, framework="llama-factory"),
        models=(model.hub_id,),
        data="alpaca",
    )


def described_data(stage: str) -> dict[str, Any]:
    """LLaMA-Factory's list of data sets; pre-training reads a column of texts."""
    columns = (
        {"prompt": "output"} if stage == "pt" else {"prompt": "instruction", "query": "input", "response": "output"}
    )
    return {"alpaca_demo": {"file_name": "../data/train.jsonl", "columns": columns}}


FAMILIES = (Family("llama-factory", FACTORY, draw_program),)
