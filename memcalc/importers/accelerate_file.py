"""Accelerate's file, also as `accelerate launch` passes it to a program with its own arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.frameworks.draft import Draft, is_on
from memcalc.importers import float8, fsdp
from memcalc.importers.deepspeed_file import read_referenced
from memcalc.importers.file_format import (
    COMPILE,
    COMPILE_MODE,
    NOT_COMPILED,
    Meaning,
    fact,
    lacking,
    nothing,
    part,
    to,
)

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

# The same inside TrainingArguments, where `accelerate launch` sets the environment of the program.
LAUNCHED = "accelerate_config"
AS_PARTS: dict[str, Meaning] = {
    LAUNCHED: fact("accelerate_config", "parallelism.zero_stage"),
    **{
        f"{LAUNCHED}.{path}": part(meaning.meaning) if meaning.kind == "mapped" else meaning
        for path, meaning in FIELDS.items()
    },
}


def deepspeed_of(config: Mapping[str, Any]) -> Any:
    """Return the DeepSpeed config of Accelerate's block: the file that it names, or its own fields."""
    return config.get("deepspeed_config_file") or {
        "zero_optimization": {
            "stage": config.get("zero_stage", 0),
            "offload_optimizer": {"device": config.get("offload_optimizer_device")},
            "offload_param": {"device": config.get("offload_param_device")},
        }
    }


_WORDS = {
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
}


def read_deepspeeds(draft: Draft, name: str) -> None:
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


def place_launch(draft: Draft) -> None:
    """Set precision and sharding of a program that Accelerate launches, where its own arguments do not.

    transformers 5.23 training_args.py: ACCELERATE_MIXED_PRECISION, unless bf16 or fp16 is set, and
    ACCELERATE_USE_DEEPSPEED, unless deepspeed is; trainer.py: Accelerator() reads the rest.
    """
    facts = draft.facts
    config = facts.get(LAUNCHED)
    if not isinstance(config, Mapping):
        return
    precision = str(config.get("mixed_precision"))
    if precision in ("bf16", "fp16", "fp8") and not (is_on(facts.get("bf16")) or is_on(facts.get("fp16"))):
        facts["fp16" if precision == "fp16" else "bf16"] = True
    if precision == "fp8":
        draft.limit("FP8 matmuls of Accelerate under Trainer", "bf16 is counted", holds_memory=True)
    kind = str(config.get("distributed_type", "NO")).upper()
    block = config.get(f"{kind.lower()}_config")
    block = block if isinstance(block, Mapping) else {}
    if kind == "DEEPSPEED":
        facts.setdefault("deepspeed", deepspeed_of(block))
    elif kind == "FSDP" and not facts.get("fsdp"):
        facts.update(kind=kind, fsdp_config=block, machines=config.get("num_machines"))
    backend = config.get("dynamo_config", {})
    backend = backend.get("dynamo_backend") if isinstance(backend, Mapping) else None
    if backend is not None and str(backend).lower() not in NOT_COMPILED:
        draft.default("training.compile", True)


# commands/launch.py: options of `accelerate launch` with names of blocks in the file.
_DEEPSPEEDS = ("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device")
_OWN = ("mixed_precision", "num_processes", "num_machines", "gradient_accumulation_steps")


def config_of_flags(config: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return an Accelerate config with the options of `accelerate launch`, which override it.

    Accelerate 1.15 commands/launch.py, utils/launch.py: the ZeRO stage is 2 unless it is set.
    """
    found = {**config, **{name: flags[name] for name in _OWN if name in flags}}
    zero = {name: flags[name] for name in _DEEPSPEEDS if name in flags}
    shards = {name: value for name, value in flags.items() if name.startswith("fsdp_")}
    if flags.get("use_deepspeed") is True or zero:
        silent = {} if "deepspeed_config_file" in zero or "deepspeed_config" in found else {"zero_stage": 2}
        found["distributed_type"] = "DEEPSPEED"
        found["deepspeed_config"] = {**silent, **(found.get("deepspeed_config") or {}), **zero}
    elif flags.get("use_fsdp") is True or shards:
        found["distributed_type"] = "FSDP"
        found["fsdp_config"] = {**(found.get("fsdp_config") or {}), **shards}
    if "dynamo_backend" in flags:
        found["dynamo_config"] = {"dynamo_backend": flags["dynamo_backend"]}
    return found
