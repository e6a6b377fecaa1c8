"""transformers' Trainer on several GPUs: `fsdp:`, `deepspeed:` or nothing (DDP) in a YAML of TrainingArguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.programs.environments import HF5, HF457
from benchmarks.programs.huggingface import (
    ADAPTERS,
    CARDS,
    PRECISIONS,
    Batch,
    adapter_fields,
    draw_batch,
    trainer_fields,
)
from benchmarks.programs.models import LARGE, SMALL, Model
from benchmarks.programs.program import STEPS, Draw, Family, Program, Sized, script, written_yaml

FILE = "config.yaml"
MOST_BILLIONS = 3  # of parameters, over all ranks that run on this host
ALONE = 8  # GPUs of which one rank is run by itself
LORA_OR_FULL = tuple("full" if kind == "qlora" else kind for kind in ADAPTERS)
GPUS = (2, ALONE, 4, ALONE)  # of a machine; 8 of them are one rank by itself, for the host has no memory for all


def fsdp(draw: Draw) -> tuple[dict[str, Any], dict[str, str]]:
    """FSDP's words in TrainingArguments; without a version it is FSDP1 until transformers 5."""
    version = draw.of("version", (None, 2, 1, 2))
    words = draw.of("strategy", ("full_shard auto_wrap", "full_shard auto_wrap", "shard_grad_op auto_wrap"))
    config = {
        "fsdp_version": version,
        "activation_checkpointing": draw.of("checkpointing in the block", (None, True, None)),
        "reshard_after_forward": draw.of("reshard", (None, True)) if version == 2 else None,
        "use_orig_params": True if version == 1 else None,
    }
    return {"fsdp": words, "fsdp_config": {k: v for k, v in config.items() if v is not None}}, {}


def fsdp1(draw: Draw) -> tuple[dict[str, Any], dict[str, str]]:
    """FSDP1's words, with what its units and their prefetch depend on."""
    config = {
        "fsdp_version": 1,
        "activation_checkpointing": draw.of("checkpointing in the block", (None, True, None)),
        "use_orig_params": draw.of("original parameters", (True, None, False)),
        "backward_prefetch": draw.of("prefetch", (None, "backward_pre", None, "backward_post")),
    }
    words = draw.of("strategy", ("full_shard auto_wrap", "full_shard auto_wrap", "shard_grad_op auto_wrap"))
    return {"fsdp": words, "fsdp_config": {k: v for k, v in config.items() if v is not None}}, {}


def deepspeed(draw: Draw) -> tuple[dict[str, Any], dict[str, str]]:
    """A DeepSpeed config with "auto", as transformers' guide has it."""
    stage = draw.of("stage", (2, 3, 1, 3, 2))
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if stage == 3:
        zero |= {
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    else:
        zero |= {"allgather_bucket_size": 2e8, "reduce_bucket_size": draw.of("bucket", (2e8, 5e8))}
    config = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    return {"deepspeed": "ds_config.json"}, {"ds_config.json": json.dumps(config, indent=2) + "\n"}


def ddp(draw: Draw) -> tuple[dict[str, Any], dict[str, str]]:
    """Plain data parallelism."""
    return {"ddp_find_unused_parameters": draw.of("unused", (None, False))}, {}


def models_on(gpus: int, *, large: bool) -> tuple[Model, ...]:
    """Models that the host has memory for: each rank that runs loads its own, before transformers 5 in fp32."""
    if gpus == ALONE:
        return (*SMALL[:3], LARGE[0], *SMALL[7:], LARGE[1]) if large else SMALL
    return tuple(model for model in SMALL if model.billions * gpus <= MOST_BILLIONS)


def draw_program(
    draw: Draw,
    block: Callable[[Draw], tuple[dict[str, Any], dict[str, str]]],
    *,
    large: bool = True,
    kinds: tuple[str, ...] = LORA_OR_FULL,
) -> Program:
    """A program of 2 to 8 ranks."""
    words, files = block(draw)
    adapters = draw.of("adapters", kinds)
    gpus = draw.of("gpus", GPUS)
    model: Model = draw.of(f"model on {gpus} GPUs", models_on(gpus, large=large))
    batch: Batch = draw_batch(draw, model)
    data = draw.of("data", ("texts", "mixed"))
    precision: Mapping[str, Any] = draw.of("precision", PRECISIONS)
    fields = {
        "model_name_or_path": model.hub_id,
        "dataset_name": "data",
        "block_size" if data == "texts" else "max_seq_length": batch.length,
        **precision,
        **adapter_fields(draw, adapters),
        **trainer_fields(draw, batch),
        "optim": draw.of("optimizer", (None, "adamw_torch", None, "adamw_torch_fused")),
        **words,
    }
    if "fsdp_config" in words and words["fsdp_config"].get("activation_checkpointing"):
        fields.pop("gradient_checkpointing", None)
        fields.pop("gradient_checkpointing_kwargs", None)
    alone = gpus == ALONE
    return Program(
        files={FILE: written_yaml(fields), "train.py": script("trainer.py"), **files},
        command=f"python train.py {FILE}" if alone else f"torchrun --nproc_per_node {gpus} train.py {FILE}",
        card=draw.of("card", CARDS),
        gpus=gpus,
        sized=Sized(FILE, (f"data_parallel={gpus}",), "trainer"),
        models=(model.hub_id,),
        data=data,
        options={"random_weights": True, "steps": STEPS, **({"world_size": gpus} if alone else {})},
    )


FAMILIES = (
    Family("trainer-5-ddp", HF5, partial(draw_program, block=ddp, large=False)),
    Family("trainer-5-fsdp", HF5, partial(draw_program, block=fsdp)),
    Family("trainer-5-fsdp1-lora", HF5, partial(draw_program, block=fsdp1, large=False, kinds=("lora",))),
    Family("trainer-5-deepspeed", HF5, partial(draw_program, block=deepspeed)),
    Family("trainer-4.57-fsdp", HF457, partial(draw_program, block=fsdp, large=False)),
)
