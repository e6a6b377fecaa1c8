"""transformers' Trainer with DeepSpeed ZeRO 2 or 3 on 2 to 4 GPUs: `deepspeed: ds_config.json`, as its guide has it.

The programs of `trainer-5-zero` keep all on the GPUs, those of `trainer-5-offload` keep optimizer states, or weights as
well, in host memory; those of `trainer-5-stage0` are without ZeRO.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.programs.environments import HF5_DEEPSPEED
from benchmarks.programs.huggingface import CARDS, adapter_fields, draw_batch, trainer_fields
from benchmarks.programs.models import SMALL, Model
from benchmarks.programs.program import STEPS, Draw, Family, Program, Sized, script, written_yaml

FILE, CONFIG = "config.yaml", "ds_config.json"
MOST_BILLIONS = 3  # of parameters, over all ranks, which all run on this host
MOST_OFFLOADED = 1.2  # the same where master weights, gradients and states are in host memory
GPUS = (2, 4, 2, 3, 2)
MODELS = (*SMALL[:7], *SMALL[8:], Model("google/gemma-3-1b-it", 8192, 4096, 1.0, (4, 50)))
PRECISIONS: tuple[Mapping[str, Any], ...] = (
    {"bf16": True},
    {"bf16": True, "torch_dtype": "bfloat16"},
    {"bf16": True},
    {"bf16": True, "torch_dtype": "float32"},
)
AUTO = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
# transformers' guide (docs/source/en/deepspeed.md), its tests' ds_config_zero3.json, and what people change of it.
THIRD: tuple[Mapping[str, Any], ...] = (
    {
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    {
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    {},
    {"reduce_bucket_size": 5e7, "stage3_prefetch_bucket_size": 5e7, "stage3_param_persistence_threshold": 1e5},
)
SECOND: tuple[Mapping[str, Any], ...] = (
    {"allgather_partitions": True, "allgather_bucket_size": 2e8, "reduce_scatter": True, "reduce_bucket_size": 2e8},
    {"allgather_partitions": True, "allgather_bucket_size": 5e8, "reduce_scatter": True, "reduce_bucket_size": 5e8},
    {"allgather_partitions": True, "allgather_bucket_size": 2e8, "reduce_scatter": True, "reduce_bucket_size": "auto"},
    {},
)
# transformers' guide and its tests: ds_config_zero2.json and ds_config_zero3.json.
_HOST: Mapping[str, Any] = {"device": "cpu", "pin_memory": True}
OFFLOADS: Mapping[int, tuple[Mapping[str, Any], ...]] = {
    2: ({"offload_optimizer": _HOST}, {"offload_optimizer": {"device": "cpu"}}),
    3: (
        {"offload_optimizer": _HOST, "offload_param": _HOST},
        {"offload_optimizer": _HOST},
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    ),
}


def draw_config(draw: Draw, stages: Sequence[int] = (3, 2)) -> dict[str, Any]:
    """A DeepSpeed config in which Trainer fills in what is "auto"."""
    stage = draw.of("stage", stages)
    more = draw.of("block of stage 3", THIRD) if stage == 3 else draw.of("block of stage 2", SECOND)
    zero = {"stage": stage, **draw.of("overlap", ({"overlap_comm": True, "contiguous_gradients": True}, {})), **more}
    return {
        "bf16": {"enabled": "auto"},
        **draw.of("optimizer block", ({}, {}, {"optimizer": torch_adam()})),
        "zero_optimization": zero,
        **dict.fromkeys(AUTO, "auto"),
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }


def torch_adam() -> dict[str, Any]:
    """PyTorch's AdamW, made by DeepSpeed: its own needs a CUDA compiler when it is made."""
    automatic = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    return {"type": "AdamW", "params": {**automatic, "torch_adam": True}}


def draw_alone(draw: Draw) -> Program:
    """A program of one rank, which DeepSpeed's engine runs, too; most move states or weights to host memory."""
    return draw_program(draw, offloads=draw.of("offload", (True, False, True)), stages=(3, 2), gpu_counts=(1,))


def draw_program(
    draw: Draw, *, offloads: bool = False, stages: Sequence[int] = (3, 2), gpu_counts: Sequence[int] = GPUS
) -> Program:
    """A program of 2 to 4 ranks, or another number, all of which run."""
    config = draw_config(draw, stages)
    most: float = MOST_BILLIONS
    if offloads:
        stage, most = config["zero_optimization"]["stage"], MOST_OFFLOADED
        config["zero_optimization"] |= draw.of(f"offload at stage {stage}", OFFLOADS[stage])
        config.pop("optimizer", None)  # without one, DeepSpeed needs its own Adam of the CPU
    adapters = draw.of("adapters", ("full", "lora", "full"))
    gpus = draw.of("gpus", gpu_counts)
    model = draw.of(f"model on {gpus} GPUs", [model for model in MODELS if model.billions * gpus <= most])
    batch = draw_batch(draw, model)
    data = draw.of("data", ("texts", "mixed", "texts", "texts"))
    fields = {
        "model_name_or_path": model.hub_id,
        "dataset_name": "data",
        "block_size" if data == "texts" else "max_seq_length": batch.length,
        **draw.of("precision", PRECISIONS),
        **adapter_fields(draw, adapters),
        **trainer_fields(draw, batch),
        "optim": draw.of("optimizer of Trainer", (None, "adamw_torch", None, "adamw_torch_fused")),
        "gradient_accumulation_steps": draw.of("micro-batches", (1, 4)),
        "deepspeed": CONFIG,
    }
    return Program(
        files={
            FILE: written_yaml(fields),
            "train.py": script("trainer.py"),
            CONFIG: json.dumps(config, indent=2) + "\n",
        },
        command=f"torchrun --nproc_per_node {gpus} train.py {FILE}",
        card=draw.of("card", CARDS),
        gpus=gpus,
        sized=Sized(FILE, (f"data_parallel={gpus}",), "trainer"),
        models=(model.hub_id,),
        data=data,
        options={"random_weights": True, "steps": STEPS},
    )


FAMILIES = (
    Family("trainer-5-zero", HF5_DEEPSPEED, draw_program),
    Family("trainer-5-offload", HF5_DEEPSPEED, partial(draw_program, offloads=True)),
    Family("trainer-5-one-rank", HF5_DEEPSPEED, draw_alone),
    Family("trainer-5-stage0", HF5_DEEPSPEED, partial(draw_program, stages=(0,))),
)
