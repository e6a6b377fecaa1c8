"""What programs around Hugging Face's Trainer vary, in its own words (TrainingArguments, and those of a script)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.programs.models import LARGE, SMALL, Model
from benchmarks.programs.program import Draw

PRECISIONS: tuple[Mapping[str, Any], ...] = (
    {"bf16": True},
    {"bf16": True, "torch_dtype": "bfloat16"},
    {"torch_dtype": "bfloat16"},
    {"bf16": True, "torch_dtype": "float32"},
    {"fp16": True, "torch_dtype": "float32"},
    {},
    {"bf16": True},
    {"bf16": True, "torch_dtype": "auto"},
)
CHECKPOINTING: tuple[Mapping[str, Any], ...] = (
    {},
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": False},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
)
OPTIMIZERS = (None, "adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", None, "adafactor", "paged_adamw_8bit", "sgd")
CLIPPING = (None, 0.3, 0.0, 1.0)
ACCUMULATION = (1, 4, None, 2)
EVALUATION: tuple[Mapping[str, Any], ...] = (
    {},
    {"eval_strategy": "no"},
    {"eval_strategy": "steps", "eval_steps": 2},
    {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1},
)
ADAPTERS = ("full", "lora", "full", "qlora", "full", "full", "lora", "full")
TARGETS = (None, "all-linear", None, "all-linear")
RANKS = (8, 16, 64)
BATCHES = (1, 2, 4, 8)
LENGTHS = (512, 1024, 2048, 4096)
CARDS = ("h100-80gb", "a100-80gb", "h100-80gb", "h200")


class Batch(NamedTuple):
    """The shape of a micro-batch."""

    size: int
    length: int


def draw_model(draw: Draw, adapters: str, release: tuple[int, int] = (5, 23)) -> Model:
    """One of the models that this release of transformers has: with adapters mostly a large one."""
    models = SMALL if adapters == "full" else (*LARGE[:3], *SMALL[:3], *LARGE[3:])
    known = [model for model in models if model.since <= release]
    return draw.of("model" if adapters == "full" else "model with adapters", known)


def draw_batch(draw: Draw, model: Model, attention: str | None = None) -> Batch:
    """A micro-batch that the model's positions and the tokens of one GPU allow; eager attention has all scores."""
    length = min(draw.of("length", LENGTHS), model.longest, 1024 if attention == "eager" else model.longest)
    return Batch(min(draw.of("batch", BATCHES), max(1, model.tokens // length)), length)


def adapter_fields(draw: Draw, adapters: str, *, dropout: bool = True) -> dict[str, Any]:
    """LoRA's fields of a file, by the names of TRL's scripts, which other scripts use as well."""
    if adapters == "full":
        return {}
    return {
        "use_peft": True,
        **({"load_in_4bit": True} if adapters == "qlora" else {}),
        "lora_r": draw.of("rank", RANKS),
        "lora_alpha": 32,
        "lora_dropout": draw.of("lora dropout", (0.0, 0.05)) if dropout else None,
        "lora_target_modules": draw.of("targets", TARGETS),
    }


def trainer_fields(draw: Draw, batch: Batch) -> dict[str, Any]:
    """TrainingArguments that matter or that everybody writes, without precision."""
    return {
        "per_device_train_batch_size": batch.size,
        "gradient_accumulation_steps": draw.of("accumulation", ACCUMULATION),
        **draw.of("checkpointing", CHECKPOINTING),
        "optim": draw.of("optimizer", OPTIMIZERS),
        "max_grad_norm": draw.of("clipping", CLIPPING),
        "learning_rate": 2e-05,
        "lr_scheduler_type": "cosine",
        "num_train_epochs": 3,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": "out",
        **draw.of("evaluation", EVALUATION),
    }
