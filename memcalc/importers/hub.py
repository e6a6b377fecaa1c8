"""A hub id as a run: transformers' Trainer with its own defaults on one GPU, or the generation that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memcalc.catalogue.resolution import resolve
from memcalc.importers.field_tables import ImportedConfig, read
from memcalc.importers.huggingface import TRAINING_ARGUMENTS

TRAINER = "transformers 5.23 Trainer"  # the version with the fields and defaults of `importers.huggingface`


# TrainingArguments for each dtype of a step: autocast, or fp32 weights.
_ARGUMENTS: dict[object, dict[str, object]] = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "fp32": {"dtype": "float32"},
}


def trainer_run(hub_id: str, overridden: Mapping[str, Any]) -> ImportedConfig:
    """Return a Trainer run on a published model with micro-batch size 1 and default TrainingArguments.

    Of a generation, for which the user sets fields of `inference`, it is the model alone.

    Args:
        hub_id: ORG/NAME.
        overridden: memcalc fields that the user sets, with their values.

    Raises:
        InputError: the model is unknown; see `memcalc.catalogue.resolution.resolve`.
        Unavailable: the model is gated, or the hub cannot be reached.
    """
    if not overridden.keys() & {"preset", "hf_config"}:
        hub_id = resolve(hub_id).hub_id
    arguments = {
        "model_name_or_path": hub_id,
        "per_device_train_batch_size": 1,
        **_ARGUMENTS.get(overridden.get("training.dtype"), {}),
    }
    found = read(TRAINING_ARGUMENTS, arguments, ".", overridden)
    if any(field.startswith("inference.") for field in overridden):
        model = {name: block for name, block in found.blocks.items() if name not in ("training", "parallelism")}
        return replace(found, name=hub_id, blocks=model, missing=(), notes=(), questions=())
    note = f"assuming {TRAINER} with default arguments and micro-batch size 1."
    return replace(found, name=hub_id, program=TRAINER, notes=(note, *found.notes))
