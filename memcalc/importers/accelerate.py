"""Accelerate's YAML, as written by `accelerate config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.frameworks.context_parallel import METHOD, place_rotation
from memcalc.frameworks.draft import FRAMEWORK, Draft
from memcalc.frameworks.lengths import place_lengths
from memcalc.frameworks.scripts import place_optimizer_step, place_outputs
from memcalc.frameworks.trainer import place_padding
from memcalc.importers import float8
from memcalc.importers.accelerate_file import FIELDS, deepspeed_of, read_deepspeeds
from memcalc.importers.file_format import LENGTH, FileFormat
from memcalc.importers.huggingface import finish_trainer


def _finish(draft: Draft) -> None:
    facts = draft.facts
    kind = str(facts.get("kind", "NO")).upper()
    precision = facts.get("precision")
    # accelerator.py: under fp8 all other operators compute in bf16
    facts["bf16"], facts["fp16"] = precision in ("bf16", "fp8"), precision == "fp16"
    if kind == "DEEPSPEED":
        config = facts.get("deepspeed_config")
        config = config if isinstance(config, Mapping) else {}
        steps = config.get("gradient_accumulation_steps")
        if type(steps) is int:
            draft.default("training.gradient_accumulation_steps", steps)
        named = config.get("deepspeed_config_file")
        if isinstance(named, str):
            read_deepspeeds(draft, named)
        facts["deepspeed"] = deepspeed_of(config)
    if kind != "FSDP":
        facts.pop("fsdp_config", None)
    _place_degrees(draft)
    place_optimizer_step(draft)
    draft.default(FRAMEWORK, "accelerate")
    finish_trainer(draft, upcast=False)
    _note_scripts(draft)
    if precision == "fp8":
        _in_8_bits(draft)


def _note_scripts(draft: Draft) -> None:
    """Set the fields that the script decides, stated or assumed."""
    if "training.optimizer" not in draft.overridden:
        draft.notes.append("no optimizer in the file; assuming adamw. Change it with --set optimizer=")
    place_outputs(draft)
    place_lengths(draft)
    if draft.given("training.implementation") == "huggingface":
        place_padding(draft)
    if draft.values["training.recipe"] == "amp" and "training.recipe" not in draft.overridden:
        draft.notes.append("assuming that the script loads fp32 weights; for 16-bit weights --set recipe=pure")


def _place_degrees(draft: Draft) -> None:
    """Set the degrees of parallelism; their product is num_processes (parallelism_config.py)."""
    facts = draft.facts
    replicas, shards, tensor, context, sequence = (
        size if type(size := facts.get(f"{name}_size", 1)) is int and size > 0 else 1
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    )
    others = tensor * context * sequence
    processes = draft.values.get("parallelism.data_parallel")
    if others > 1:
        draft.default("parallelism.tensor_parallel", tensor)
        draft.default("parallelism.context_parallel", context * sequence)
        if sequence > 1:  # DeepSpeed's UlyssesSPAttentionHF
            draft.default(METHOD, "all-to-all")
        place_rotation(draft, facts.get("rotation"))
        if type(processes) is int and processes % others == 0:
            draft.values["parallelism.data_parallel"] = processes // others
    if replicas * shards > 1:
        draft.default("parallelism.data_parallel", replicas * shards)
    if replicas > 1:
        draft.default("parallelism.data_parallel_replicate", replicas)


def _in_8_bits(draft: Draft) -> None:
    """Set FP8 matmuls of torchao if the file names it or no backend: accelerator.py tries torchao first."""
    backend = str(draft.facts.get("fp8_backend", "AO")).upper()
    if backend in ("AO", "TORCHAO"):
        gathers = draft.facts.get("fp8_gather", True) is True  # utils/dataclasses.py, AORecipeKwargs
        float8.multiply_in_8_bits(draft, "tensorwise", gathers=gathers, note=float8.FIRST_LAYER)
    else:
        draft.limit(f"FP8 matmuls by {backend}", holds_memory=True)


def _recognized(data: Mapping[str, Any]) -> bool:
    beside = ("mixed_precision", "num_processes", "compute_environment", "deepspeed_config", "fsdp_config")
    return "distributed_type" in data and any(key in data for key in beside)


ACCELERATE = FileFormat(
    "Accelerate",
    "1.11",
    FIELDS,
    _finish,
    _recognized,
    (("training.micro_batch_size", "sequences per forward, which the script sets"), LENGTH),
    framework="accelerate",
)
