"""Accelerate's YAML, as written by `accelerate config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.frameworks.context_parallel import METHOD, place_rotation
from memcalc.frameworks.draft import FRAMEWORK, Draft
from memcalc.frameworks.lengths import place_lengths
from memcalc.frameworks.scripts import place_optimizer_step, place_outputs
from memcalc.frameworks.trainer import place_padding
from memcalc.importers import float8, fsdp
from memcalc.importers.deepspeed_file import read_referenced
from memcalc.importers.file_format import (
    COMPILE,
    COMPILE_MODE,
    LENGTH,
    FileFormat,
    Meaning,
    fact,
    lacking,
    nothing,
    part,
    to,
)
from memcalc.importers.huggingface import finish_trainer

_LAUNCHER = ("multinode_launcher", "hostfile", "exclusion_filter", "inclusion_filter")

# accelerate 1.11, commands/config/config_args.py, utils/dataclasses.py.
FIELDS: dict[str, Meaning] = {
    "distributed_type": fact("kind", "parallelism.engine"),
    "mixed_precision": fact("precision", "training.dtype: precision of the step", reads_auto=True),
    "num_processes": to("parallelism.data_parallel"),
    "gradient_accumulation_steps": to("training.gradient_accumulation_steps"),
    **fsdp.BLOCK,
    "deepspeed_config": fact("deepspeed_config", "parallelism.zero_stage"),
    **part("parallelism.zero_stage").at("deepspeed_config.deepspeed_config_file deepspeed_config.zero_stage"),
    "deepspeed_config.gradient_accumulation_steps": part("training.gradient_accumulation_steps"),
    **part("parallelism.offload").at("deepspeed_config.offload_optimizer_device deepspeed_config.offload_param_device"),
    "deepspeed_config.offload_*": nothing("part of the offload"),
    "deepspeed_config.gradient_clipping": nothing("gradient clipping is not estimated"),
    "deepspeed_config.zero3_*": nothing("loading and saving are not estimated"),
    "deepspeed_config.deepspeed_moe_layer_cls_names": nothing("changes the implementation, not what is saved"),
    **{f"deepspeed_config.deepspeed_{name}": nothing() for name in _LAUNCHER},
    **{
        f"parallelism_config.parallelism_config_{name}_size": fact(f"{name}_size", words)
        for name, words in (
            ("dp_replicate", "parallelism.data_parallel_replicate"),
            ("dp_shard", "parallelism.data_parallel"),
            ("tp", "parallelism.tensor_parallel"),
            ("cp", "parallelism.context_parallel"),
            ("sp", "parallelism.context_parallel"),
        )
    },
    "parallelism_config.parallelism_config_cp_comm_strategy": fact("rotation", "parallelism.context_parallel_method"),
    "parallelism_config.parallelism_config_*": nothing("changes the implementation, not what is saved"),
    "parallelism_config*": lacking("parallelism other than data parallelism", overcounts="all"),
    "megatron_lm_config*": lacking("Megatron-LM under Accelerate", "pass the arguments of Megatron-LM instead"),
    "dynamo_config.dynamo_backend": COMPILE,
    "dynamo_config.dynamo_mode": COMPILE_MODE,
    "dynamo_config*": nothing("part of torch.compile"),
    "fp8_config.backend": fact("fp8_backend", "training.fp8"),
    "fp8_config.enable_fsdp_float8_all_gather": float8.GATHER,
    "fp8_config*": nothing("changes how scales are computed, not what is saved"),
    **nothing().at(
        "tpu* compute_environment debug enable_cpu_affinity machine_rank main_* rdzv_backend same_network use_cpu",
        "mpirun_config* comms_config* ipex_config*",
    ),
    "downcast_bf16": nothing("for TPUs"),
    "gpu_ids": nothing("num_processes counts them"),
    "num_machines": fact("machines", "parallelism.data_parallel_replicate"),
    "command*": nothing("the program itself"),
}


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
            _read_deepspeeds(draft, named)
        facts["deepspeed"] = named or {
            "zero_optimization": {
                "stage": config.get("zero_stage", 0),
                "offload_optimizer": {"device": config.get("offload_optimizer_device")},
                "offload_param": {"device": config.get("offload_param_device")},
            }
        }
    if kind != "FSDP":
        facts.pop("fsdp_config", None)
    _place_degrees(draft)
    place_optimizer_step(draft)
    draft.default(FRAMEWORK, "accelerate")
    finish_trainer(draft, upcast=False)
    _note_scripts(draft)
    if precision == "fp8":
        _in_8_bits(draft)


_WORDS = {
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
}


def _read_deepspeeds(draft: Draft, name: str) -> None:
    """Set precision and batch from the DeepSpeed config that the file names (utils/deepspeed.py)."""
    config = read_referenced(draft.directory, name)
    if not isinstance(config, Mapping):
        return
    for half in ("bf16", "fp16"):
        block = config.get(half)
        if isinstance(block, Mapping) and block.get("enabled") is True:
            draft.facts[half] = True
    for word, path in _WORDS.items():
        if type(config.get(word)) is int:
            draft.default(path, config[word])


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
