"""A hub id as a run: transformers' Trainer with its own defaults, on one GPU."""

from __future__ import annotations

from dataclasses import replace

from memcalc.catalogue.resolution import resolve
from memcalc.importers.engine import Imported, read
from memcalc.importers.huggingface import TRAINING_ARGUMENTS
from memcalc.spec.families import attends_eagerly

TRAINER = "transformers 5.23 Trainer"  # the release whose fields and defaults `importers.huggingface` has


# The arguments with which Trainer's step is in a dtype: autocast, or weights in fp32.
_ARGUMENTS: dict[object, dict[str, object]] = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "fp32": {"dtype": "float32"},
}


def trainer_run(hub_id: str, overridden: frozenset[str], dtype: object = None) -> Imported:
    """Return the run of Trainer on a published model: micro-batch 1, everything else as TrainingArguments default it.

    Args:
        hub_id: ORG/NAME.
        overridden: our fields that the user sets anyway.
        dtype: what the user sets `training.dtype` to; None: nothing.

    Raises:
        InputError: the model is unknown; see `memcalc.catalogue.resolution.resolve`.
        Unavailable: the model is gated, or the hub cannot be reached.
    """
    model_type: object = None
    if not overridden & {"preset", "hf_config"}:
        published = resolve(hub_id)
        hub_id, model_type = published.hub_id, published.config.get("model_type")
    arguments = {"model_name_or_path": hub_id, "per_device_train_batch_size": 1, **_ARGUMENTS.get(dtype, {})}
    found = read(TRAINING_ARGUMENTS, arguments, ".", overridden)
    training = found.blocks["training"]
    if training["dtype"] == "fp32" and not attends_eagerly(model_type, training["implementation"]):
        training.setdefault("attention", "memory-efficient")  # sdpa's choice: its flash kernel takes no fp32
    note = f"the run is that of {TRAINER} with its defaults and micro-batch 1."
    return replace(found, name=hub_id, program=TRAINER, notes=(note, *found.notes))
