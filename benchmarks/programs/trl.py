"""TRL's trainers by its own programs: `trl sft|dpo|reward|grpo --config FILE`, on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.programs.data import PROMPT
from benchmarks.programs.environments import HF5, HF5_TRL_114
from benchmarks.programs.huggingface import (
    ADAPTERS,
    CARDS,
    Batch,
    adapter_fields,
    draw_batch,
    draw_model,
    trainer_fields,
)
from benchmarks.programs.program import Draw, Family, Program, Sized, written_yaml

FILE = "config.yaml"

# TRL's trainers compute in bf16 and checkpoint where a file does not say otherwise (trl/trainer/base_config.py).
PRECISIONS: tuple[Mapping[str, Any], ...] = (
    {},
    {"dtype": "bfloat16"},
    {"bf16": True},
    {"dtype": "bfloat16", "bf16": True},
    {"dtype": "float32"},
    {"dtype": "float32", "bf16": False},
    {"dtype": "auto"},
    {"dtype": "bfloat16", "bf16": False},
)
CHECKPOINTING: tuple[Mapping[str, Any], ...] = (
    {},
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": False},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
)


def fields_of(draw: Draw, batch: Batch, adapters: str) -> dict[str, Any]:
    """What all of TRL's files have."""
    precision = draw.of("precision", PRECISIONS)
    shared = trainer_fields(draw, batch)
    shared.pop("gradient_checkpointing", None)
    shared.pop("gradient_checkpointing_kwargs", None)
    return {
        "dataset_name": "data",
        **({"dtype": "bfloat16"} if adapters == "qlora" else precision),
        **adapter_fields(draw, adapters),
        **shared,
        **draw.of("checkpointing", CHECKPOINTING),
    }


def program(command: str, fields: Mapping[str, Any], draw: Draw, *, model: str, data: str, **more: Any) -> Program:
    """`trl COMMAND --config config.yaml`."""
    return Program(
        files={FILE: written_yaml({"model_name_or_path": model, **fields})} | more.get("files", {}),
        command=f"trl {command} --config {FILE}",
        card=draw.of("card", CARDS),
        sized=Sized(FILE, more.get("settings", ()), command),
        models=(model,),
        data=data,
    )


def draw_sft(draw: Draw) -> Program:
    """Supervised fine-tuning, padded or packed."""
    adapters = draw.of("adapters", ADAPTERS)
    model = draw_model(draw, adapters)
    batch = draw_batch(draw, model)
    fields = {
        "max_length": batch.length,
        "packing": draw.of("packing", (None, True, None, False)),
        "loss_type": draw.of("loss", (None, None, "nll", "chunked_nll", None, "dft", None, "nll")),
        **fields_of(draw, batch, adapters),
    }
    return program("sft", fields, draw, model=model.hub_id, data=draw.of("data", ("texts", "mixed")))


def draw_qlora(draw: Draw) -> Program:
    """Supervised fine-tuning on a 4-bit base that multiplies in fp32, as TRL's default dtype has it."""
    model = draw_model(draw, "qlora")
    batch = draw_batch(draw, model)
    fields = {"max_length": batch.length, **fields_of(draw, batch, "qlora")}
    del fields["dtype"]
    fields |= draw.of("precision of the base", ({}, {"bf16": True}, {"dtype": "float32"}, {"bf16": False}))
    return program("sft", fields, draw, model=model.hub_id, data="texts")


def draw_dpo(draw: Draw) -> Program:
    """Preference training: chosen and rejected sequences in one forward, beside a reference."""
    adapters = draw.of("adapters", ADAPTERS)
    model = draw_model(draw, adapters)
    batch = draw_batch(draw, model)
    half = Batch(max(1, batch.size // 2), batch.length)
    fields = {
        "max_length": half.length,
        "beta": draw.of("beta", (None, 0.1, 0.05, None)),
        "loss_type": draw.of("loss", (None, None, ["ipo"], None, ["sigmoid"], ["hinge"], ["sigmoid", "sft"], None)),
        "precompute_ref_log_probs": draw.of("reference", (None, None, None, True)),
        **fields_of(draw, half, adapters),
    }
    return program("dpo", fields, draw, model=model.hub_id, data="pairs")


def draw_reward(draw: Draw) -> Program:
    """A reward model: pairs, and one score for each sequence."""
    adapters = draw.of("adapters", ADAPTERS)
    model = draw_model(draw, adapters)
    batch = draw_batch(draw, model)
    half = Batch(max(1, batch.size // 2), batch.length)
    fields = {
        "max_length": half.length,
        "center_rewards_coefficient": draw.of("center", (None, 0.01, None)),
        **fields_of(draw, half, adapters),
    }
    fields.pop("load_in_4bit", None)
    if "use_peft" in fields:
        fields["lora_task_type"] = "SEQ_CLS"
    return program("reward", fields, draw, model=model.hub_id, data=f"pairs-{half.length}")


REWARD = '''"""A reward that needs no model: longer answers are better."""


def reward_length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]
'''


def draw_grpo(draw: Draw) -> Program:
    """Group-relative policy optimization with transformers' generation."""
    adapters = draw.of("adapters", ADAPTERS)
    model = draw_model(draw, adapters)
    generations = draw.of("generations", (4, 8, None, 4))
    length = draw.of("completion", (128, 64, 256, 128))
    size = draw.of("groups", (1, 2, 1)) * (generations or 8)
    fields = {
        "reward_funcs": ["rewards.reward_length"],
        "num_generations": generations,
        "max_completion_length": length,
        "beta": draw.of("beta", (None, 0.04, 0.0, 0.001)),
        "num_iterations": draw.of("iterations", (None, None, 2)),
        "loss_type": draw.of("loss", (None, "grpo", "dr_grpo", None)),
        **fields_of(draw, Batch(size, length), adapters),
        "gradient_accumulation_steps": draw.of("accumulation", (None, 2, 1, 4)),
        "eval_strategy": "no",
        "eval_steps": None,
        "per_device_eval_batch_size": None,
    }
    return program(
        "grpo",
        fields,
        draw,
        model=model.hub_id,
        data="prompts",
        files={"rewards.py": REWARD},
        settings=(f"sequence_length={PROMPT + length}",),  # the prompts' length is that of the data
    )


FAMILIES = (
    Family("trl-sft", HF5, draw_sft),
    Family("trl-qlora", HF5, draw_qlora),
    Family("trl-dpo", HF5, draw_dpo),
    Family("trl-dpo-1.14", HF5_TRL_114, draw_dpo),
    Family("trl-reward", HF5, draw_reward),
    Family("trl-grpo", HF5, draw_grpo),
)
