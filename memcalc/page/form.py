"""The fields of the form with the values that it offers, from the models that validate them."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from memcalc.spec.fields import BLOCKS, NESTED
from memcalc.spec.hardware.gpus import all_gpus
from memcalc.spec.presets import preset_names
from memcalc.spec.recipes import RECIPES

# Blocks of the form, and the paths of their fields. The first block is open; a click opens the others.
FIELDS: dict[str, tuple[str, ...]] = {
    "Run": (
        "training.micro_batch_size",
        "training.sequence_length",
        "training.recipe",
        "training.recompute",
        "parallelism.zero_stage",
    ),
    "Training": (
        "training.implementation",
        "training.dtype",
        "training.optimizer",
        "training.optimizer_implementation",
        "training.gradient_accumulation_steps",
        "training.attention",
        "training.loss",
        "training.fp8",
        "training.alloc_conf",
    ),
    "Adapters": ("training.finetune", "training.lora.rank", "training.lora.target_modules"),
    "Sharding": (
        "parallelism.engine",
        "parallelism.tensor_parallel",
        "parallelism.pipeline_parallel",
        "parallelism.context_parallel",
        "parallelism.expert_parallel",
        "parallelism.sequence_parallel",
        "parallelism.offload",
    ),
}
TITLES = {
    "training.micro_batch_size": "micro-batch size (b)",
    "training.sequence_length": "sequence length (s)",
    "training.recipe": "recipe",
    "training.alloc_conf": "PYTORCH_CUDA_ALLOC_CONF",
    "training.lora.rank": "LoRA rank",
    "training.lora.target_modules": "LoRA targets",
    "parallelism.zero_stage": "ZeRO stage",
}
# Values that the form offers for fields that accept more.
OFFERED: dict[str, tuple[str, ...]] = {
    "training.recompute": ("none", "selective", "full", "every-2", "every-4"),
    "training.recipe": tuple(RECIPES),
    "parallelism.zero_stage": ("0", "1", "2", "3"),
}


def choices() -> dict[str, Any]:
    """Return the names of models and GPUs, and the form's fields with their values and descriptions."""
    return {
        "models": preset_names(),
        "gpus": [{"name": gpu.name, "label": gpu.label} for gpu in all_gpus()],
        "blocks": [{"title": title, "fields": [_field(path) for path in paths]} for title, paths in FIELDS.items()],
    }


def _field(path: str) -> dict[str, Any]:
    block, _, name = path.rpartition(".")
    model = NESTED[block.rpartition(".")[2]] if "." in block else BLOCKS[block]
    field = model.model_fields[name]
    kind, values = _kind(field.annotation)
    return {
        "path": path,
        "title": TITLES.get(path, name.replace("_", " ")),
        "kind": "choice" if path in OFFERED else kind,
        "values": list(OFFERED.get(path, values)),
        "description": field.description or "",
    }


def _kind(annotation: Any) -> tuple[str, tuple[str, ...]]:
    """Return how a field is entered ("choice", "number" or "text"), and the values to choose from."""
    if annotation is bool:
        return "choice", ("false", "true")
    if get_origin(annotation) is Literal:
        return "choice", tuple(map(str, get_args(annotation)))
    for inner in get_args(annotation):
        kind, values = _kind(inner)
        if kind != "text":
            return kind, values
    return ("number", ()) if annotation is int else ("text", ())
