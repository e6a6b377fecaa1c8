"""transformers' Trainer with context parallelism: Accelerate's YAML has FSDP2 and the ranks that share a sequence."""

from __future__ import annotations

from typing import Any

from benchmarks.programs.accelerated import SHARED
from benchmarks.programs.environments import HF5
from benchmarks.programs.huggingface import CARDS, Batch
from benchmarks.programs.models import SMALL, Model
from benchmarks.programs.program import Draw, Family, Program, Sized, script, written_yaml

LAUNCH, FILE = "accelerate.yaml", "config.yaml"
# Accelerate rejects layers with a window, and drops the mask of modules with the name self_attn.
MODELS = tuple(
    model for model in SMALL if model.hub_id.split("/")[0] in ("Qwen", "meta-llama", "HuggingFaceTB", "TinyLlama")
)
RANKS = ((1, 2), (2, 2), (1, 4), (1, 2))  # that shard a sequence's batch, and a sequence
MOST_BILLIONS = 3  # of parameters, over all ranks that run on this host
METHODS = {"allgather": "all-gather", "alltoall": "ring"}  # Accelerate's words, and memcalc's
LENGTHS = (4096, 2048, 8192, 4096)


def draw_program(draw: Draw) -> Program:
    """A program of 2 or 4 ranks, trained in full."""
    data_ranks, ranks = draw.of("ranks", RANKS)
    gpus = data_ranks * ranks
    known = tuple(model for model in MODELS if model.billions * gpus <= MOST_BILLIONS)
    model: Model = draw.of(f"model on {gpus} GPUs", known)
    length = min(draw.of("length", LENGTHS), model.longest)
    batch = Batch(draw.of("batch", (1, 2, 1, 4)), length)
    checkpointing = draw.of("checkpointing", (True, False, False))
    reshard = draw.of("reshard", (True, False, True))
    launch = {
        **SHARED,
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_activation_checkpointing": checkpointing,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_offload_params": False,
            "fsdp_reshard_after_forward": reshard,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_version": 2,
        },
        "mixed_precision": "bf16",
        "num_processes": gpus,
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": data_ranks,
            "parallelism_config_tp_size": 1,
            "parallelism_config_cp_size": ranks,
            "parallelism_config_cp_comm_strategy": (method := draw.of("method", tuple(METHODS))),
        },
    }
    fields: dict[str, Any] = {
        "model_name_or_path": model.hub_id,
        "dataset_name": "data",
        "block_size": batch.length,
        "torch_dtype": draw.of("dtype of weights", (None, "bfloat16")),
        "bf16": True,
        "per_device_train_batch_size": batch.size,
        "gradient_accumulation_steps": draw.of("accumulation", (1, 4, 1, 2)),
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "version": 2,
            "activation_checkpointing": checkpointing,
            "reshard_after_forward": reshard,
        },
        "num_train_epochs": 3,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": "out",
    }
    settings = (
        f"data_parallel={data_ranks}",
        f"context_parallel={ranks}",
        f"context_parallel_method={METHODS[method]}",
    )
    return Program(
        files={LAUNCH: written_yaml(launch), FILE: written_yaml(fields), "train.py": script("trainer.py")},
        command=f"accelerate launch --config_file {LAUNCH} train.py {FILE}",
        card=draw.of("card", CARDS),
        gpus=gpus,
        sized=Sized(FILE, settings, "trainer"),
        models=(model.hub_id,),
        data="texts",
    )


FAMILIES = (Family("trainer-5-context", HF5, draw_program),)
