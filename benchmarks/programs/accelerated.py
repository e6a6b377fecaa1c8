"""Accelerate: a script of one's own below `accelerate launch`, with FSDP1, FSDP2, DeepSpeed or DDP in its YAML."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.programs.environments import HF5, HF5_DEEPSPEED
from benchmarks.programs.huggingface import CARDS, draw_batch
from benchmarks.programs.program import Draw, Family, Program, Sized, script, written_yaml
from benchmarks.programs.ranks import models_on

FILE = "config.yaml"
GPUS = (2, 2, 4, 2)
WRAPPING = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP")

SHARED: Mapping[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "num_machines": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}
# Precision of the YAML, and the dtype in which the script loads the weights.
PRECISIONS = (
    ("bf16", "float32"),
    ("bf16", "bfloat16"),
    ("no", "bfloat16"),
    ("bf16", "float32"),
    ("fp16", "float32"),
    ("no", "float32"),
    ("bf16", "bfloat16"),
    ("bf16", "float32"),
)


def fsdp1(draw: Draw) -> dict[str, Any]:
    """FSDP1's block, as `accelerate config` writes it."""
    return {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_activation_checkpointing": draw.of("checkpointing in the YAML", (False, True, False)),
            "fsdp_auto_wrap_policy": draw.of(
                "wrapping", ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP")
            ),
            "fsdp_backward_prefetch": draw.of("prefetch", ("BACKWARD_PRE", "NO_PREFETCH", "BACKWARD_PRE")),
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_forward_prefetch": False,
            "fsdp_min_num_params": 20_000_000,
            "fsdp_offload_params": False,
            "fsdp_sharding_strategy": draw.of("strategy", ("FULL_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "FULL_SHARD")),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_sync_module_states": True,
            "fsdp_use_orig_params": draw.of("original parameters", (True, True, False)),
            "fsdp_version": 1,
        },
    }


def fsdp2(draw: Draw) -> dict[str, Any]:
    """FSDP2's block."""
    return {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_activation_checkpointing": draw.of("checkpointing in the YAML", (False, True, False)),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": draw.of("loading", (False, True)),
            "fsdp_offload_params": False,
            "fsdp_reshard_after_forward": draw.of("reshard", (True, False, True, True)),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_version": 2,
        },
    }


def deepspeed(draw: Draw) -> dict[str, Any]:
    """DeepSpeed's block; accumulation and clipping are in it."""
    stage = draw.of("stage", (1, 2, 3, 2, 3))
    return {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_multinode_launcher": "standard",
            "gradient_accumulation_steps": draw.of("accumulation", (1, 4, 1, 2)),
            "gradient_clipping": 1.0,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "zero3_init_flag": False if stage < 3 else draw.of("init", (False, True)),
            "zero_stage": stage,
        },
    }


def ddp(draw: Draw) -> dict[str, Any]:
    """Plain data parallelism."""
    del draw
    return {"distributed_type": "MULTI_GPU", "gpu_ids": "all"}


def draw_program(draw: Draw, block: Any) -> Program:
    """A program of 2 to 4 processes."""
    kind = block(draw)
    sharded = kind["distributed_type"] != "MULTI_GPU"
    gpus = draw.of("gpus", GPUS)
    model = draw.of(f"model on {gpus} GPUs", models_on(gpus, large=False))
    batch = draw_batch(draw, model)
    precision, loaded = draw.of("precision", PRECISIONS)
    if precision == "no" and "deepspeed_config" in kind:
        loaded = "float32"  # DeepSpeed without a precision refuses weights of 16 bits
    checkpointing = draw.of("checkpointing", (False, True, False)) and not kind.get("fsdp_config", {}).get(
        "fsdp_activation_checkpointing"
    )
    accumulation = kind.get("deepspeed_config", {}).get("gradient_accumulation_steps") or draw.of(
        "accumulation", (1, 4, 1, 2)
    )
    config = {**SHARED, **kind, "mixed_precision": precision, "num_processes": gpus}
    words = {
        "model_name_or_path": model.hub_id,
        "torch_dtype": loaded,
        "max_length": batch.length,
        "per_device_train_batch_size": batch.size,
        "gradient_accumulation_steps": accumulation,
        "max_grad_norm": draw.of("clipping", (1.0, 0.0, 1.0)),
    }
    options = (
        " ".join(f"--{name} {value}" for name, value in words.items()) + checkpointing * " --gradient_checkpointing"
    )
    # What the script's own options say: its model, its batch, the dtype in which it loads the weights.
    settings = [f"preset={model.hub_id}", f"b={batch.size}", f"s={batch.length}"]
    settings += [f"gradient_accumulation_steps={accumulation}"] if accumulation > 1 else []
    settings += ["recompute=full"] if checkpointing else []
    settings += [f"gradient_clipping={words['max_grad_norm']}"] if words["max_grad_norm"] else []
    if loaded == "bfloat16" and (precision == "no" or not sharded):
        settings += ["recipe=pure", "dtype=bf16"]
    return Program(
        files={FILE: written_yaml(config), "train.py": script("accelerated.py")},
        command=f"accelerate launch --config_file {FILE} train.py {options}",
        card=draw.of("card", CARDS),
        gpus=gpus,
        sized=Sized(FILE, tuple(settings), "accelerate"),
        models=(model.hub_id,),
        data=draw.of("data", ("texts", "mixed")),
    )


FAMILIES = tuple(
    Family(f"accelerate-{block.__name__}", environment, partial(draw_program, block=block))
    for block, environment in ((fsdp1, HF5), (fsdp2, HF5), (deepspeed, HF5_DEEPSPEED), (ddp, HF5))
)
