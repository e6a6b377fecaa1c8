"""torchtitan: `python -m torchtitan.train --job.config_file FILE`, one rank of many.

torchtitan's run_train.sh sets the allocator; whoever starts the module, or torchrun, does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.programs.environments import TITAN, TITAN_FLOAT8
from benchmarks.programs.huggingface import CARDS
from benchmarks.programs.program import STEPS, Draw, Family, Program, Sized

FILE = "train.toml"
# name, flavor, and the hub id of the tokenizer.
MODELS = (
    ("llama3", "8B", "meta-llama/Llama-3.1-8B"),
    ("qwen3", "8B", "Qwen/Qwen3-8B"),
    ("llama3", "8B", "meta-llama/Llama-3.1-8B"),
    ("qwen3", "14B", "Qwen/Qwen3-14B"),
    ("llama3", "70B", "meta-llama/Llama-3.1-8B"),
)
LAUNCHES = ("env PYTORCH_ALLOC_CONF=expandable_segments:True ", "")
WITHOUT_SETTINGS = ("torchtitan/development", "torchtitan/held-out")  # seeds that were drawn before there was a choice
CHECKPOINTING: tuple[Mapping[str, Any], ...] = (
    {"mode": "selective", "selective_ac_option": "op"},
    {"mode": "none"},
    {"mode": "full"},
    {"mode": "selective", "selective_ac_option": "2"},
)


def draw_program(draw: Draw) -> Program:
    """A program of 2 to 64 ranks, of which one is run by itself."""
    name, flavor, assets = draw.of("model", MODELS)
    gpus = draw.of("gpus", (8, 4, 16, 8)) * (8 if flavor == "70B" else 1)
    tensor = draw.of("tensor parallel", (1, 1, 2, 1)) if name == "llama3" else 1
    tables: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": "./outputs", "description": f"{name} {flavor} training"},
        "metrics": {"log_freq": 10, "enable_tensorboard": False},
        "model": {"name": name, "flavor": flavor, "hf_assets_path": f"./{assets}"},
        "optimizer": {"name": "AdamW", "lr": 3e-4, "eps": 1e-8},
        "lr_scheduler": {"warmup_steps": 200},
        "training": {
            "local_batch_size": draw.of("batch", (1, 2, 1, 4)),
            "seq_len": draw.of("length", (8192, 4096, 2048, 4096)),
            "max_norm": 1.0,
            "steps": 1000,
            "dataset": "c4_test",
            "dataset_path": "data",
        },
        "parallelism": {
            "data_parallel_replicate_degree": draw.of("replicas", (1, 1, 2)),
            "data_parallel_shard_degree": -1,
            "tensor_parallel_degree": tensor,
            "pipeline_parallel_degree": 1,
            "context_parallel_degree": 1,
            "fsdp_reshard_after_forward": draw.of("reshard", ("default", "default", "never")),
        },
        "checkpoint": {"enable": False},
        "activation_checkpoint": dict(draw.of("checkpointing", CHECKPOINTING)),
        "compile": {"enable": False},
    }
    machine = min(gpus, 8)
    launch = "" if draw.seed in WITHOUT_SETTINGS else draw.of("launch", LAUNCHES)
    return Program(
        files={FILE: written_toml(tables)},
        command=f"{launch}python -m torchtitan.train --job.config_file ./{FILE}",
        card=draw.of("card", CARDS),
        gpus=machine,
        sized=Sized(FILE, (f"gpus={gpus}",), "torchtitan"),
        models=(assets,),
        data="texts",
        options={"steps": STEPS, "world_size": gpus},
    )


def tables_of(
    model: tuple[str, str, str],
    *,
    batch: int,
    length: int,
    parallelism: Mapping[str, Any],
    checkpointing: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """The tables of a job that pretrains a model (name, flavor, hub id of its tokenizer) on short documents."""
    name, flavor, assets = model
    return {
        "model": {"name": name, "flavor": flavor, "hf_assets_path": f"./{assets}"},
        "optimizer": {"name": "AdamW", "lr": 3e-4},
        "training": {
            "local_batch_size": batch,
            "seq_len": length,
            "steps": 1000,
            "dataset": "c4_test",
            "dataset_path": "data",
        },
        "parallelism": dict(parallelism),
        "checkpoint": {"enable": False},
        "activation_checkpoint": dict(checkpointing),
        "compile": {"enable": False},
    }


def written_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A user's TOML file."""
    lines = []
    for table, fields in tables.items():
        lines.append(f"[{table}]")
        for name, value in fields.items():
            word = json.dumps(value) if isinstance(value, str | list) else str(value).lower()
            lines.append(f"{name} = {word}")
        lines.append("")
    return "\n".join(lines)


# Keys of quantize.linear.float8. In 0.2.2 its converter's name never selects the tensor-parallel plan for FP8
# (models/llama3/infra/parallelize.py looks for "float8"), so tensor parallelism gathers activations in 16 bits.
FLOAT8: tuple[Mapping[str, Any], ...] = (
    {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True},
    {"recipe_name": "rowwise"},
    {"enable_fsdp_float8_all_gather": False},
    {"recipe_name": "rowwise_with_gw_hp"},
)


def draw_float8_program(draw: Draw) -> Program:
    """A program of Llama with torchao's FP8 layers, which DTensor splits."""
    flavor, gpus = draw.of("flavor", (("8B", 16), ("8B", 32), ("70B", 64)))
    tables = tables_of(
        ("llama3", flavor, "meta-llama/Llama-3.1-8B"),
        batch=draw.of("batch", (1, 2, 1)),
        length=draw.of("length", (4096, 8192, 2048)),
        parallelism={
            "data_parallel_shard_degree": -1,
            "tensor_parallel_degree": draw.of("tensor parallel", (2, 4, 8)),
            "fsdp_reshard_after_forward": draw.of("reshard", ("default", "default", "never")),
        },
        checkpointing=draw.of("checkpointing", CHECKPOINTING),
    )
    quantized = {
        "model": {**tables.pop("model"), "converters": ["quantize.linear.float8"]},
        "quantize.linear.float8": {
            **draw.of("float8", FLOAT8),
            "filter_fqns": draw.of("filter", (["output"], ["output", "attention.wk", "attention.wv"])),
        },
        **tables,
    }
    return Program(
        files={FILE: written_toml(quantized)},
        command=f"{draw.of('launch', LAUNCHES)}python -m torchtitan.train --job.config_file ./{FILE}",
        card=draw.of("card", ("h100-80gb", "h200", "h100-80gb")),
        gpus=8,
        sized=Sized(FILE, (f"gpus={gpus}",), "torchtitan"),
        models=("meta-llama/Llama-3.1-8B",),
        data="texts",
        options={"steps": STEPS, "world_size": gpus},
    )


# GPUs, pipeline stages, tensor parallelism; the rest are shards.
LAYOUTS = ((4, 2, 1), (8, 2, 2), (4, 4, 1), (8, 4, 1), (4, 2, 2))


def draw_pipeline(draw: Draw) -> Program:
    """A program in pipeline stages, of which every rank runs: they agree on the shapes of what they send."""
    gpus, stages, tensor = draw.of("layout", LAYOUTS)
    name, flavor, assets = draw.of("model", MODELS[:3])
    tables = tables_of(
        (name, flavor, assets),
        batch=stages * draw.of("batch", (1, 2, 2, 3)),
        length=draw.of("length", (2048, 4096, 1024)),
        parallelism={
            "data_parallel_shard_degree": -1,
            "tensor_parallel_degree": tensor if name == "llama3" else 1,
            "pipeline_parallel_degree": stages,
            "pipeline_parallel_schedule": draw.of("schedule", ("1F1B", "Interleaved1F1B", "1F1B", "GPipe")),
            "pipeline_parallel_microbatch_size": 1,
            "fsdp_reshard_after_forward": draw.of("reshard", ("default", "default", "always", "never")),
        },
        checkpointing=draw.of("checkpointing", CHECKPOINTING),
    )
    launch = f"{draw.of('launch', LAUNCHES)}torchrun --nproc_per_node={gpus} -m torchtitan.train"
    return Program(
        files={FILE: written_toml(tables)},
        command=f"{launch} --job.config_file ./{FILE}",
        card=draw.of("card", ("h100-80gb", "h200", "h100-80gb")),
        gpus=gpus,
        sized=Sized(FILE, (f"gpus={gpus}",), "torchtitan"),
        models=(assets,),
        data="texts",
        options={"steps": STEPS},
    )


# GPUs and tensor parallelism without FSDP: one GPU, DDP, or tensor-parallel ranks alone.
WITHOUT_FSDP = ((1, 1), (8, 1), (1, 1), (4, 4), (2, 2), (8, 8), (2, 1))


def draw_unsharded(draw: Draw) -> Program:
    """A program without FSDP: autocast on one GPU and under DDP, fp32 under tensor parallelism alone."""
    gpus, tensor = draw.of("layout", WITHOUT_FSDP)
    name, flavor, assets = draw.of("model", MODELS[:3])
    tensor = tensor if name == "llama3" else 1
    tables = tables_of(
        (name, flavor, assets),
        batch=draw.of("batch", (1, 2, 1, 3)),
        length=draw.of("length", (2048, 4096, 1024)),
        parallelism={
            "data_parallel_replicate_degree": gpus // tensor,
            "data_parallel_shard_degree": 1,
            "tensor_parallel_degree": tensor,
        },
        checkpointing=draw.of("checkpointing", CHECKPOINTING),
    )
    return Program(
        files={FILE: written_toml(tables)},
        command=f"{draw.of('launch', LAUNCHES)}python -m torchtitan.train --job.config_file ./{FILE}",
        card="b200",  # 16 bytes of each of 8 billion parameters
        gpus=gpus,
        sized=Sized(FILE, (f"gpus={gpus}",), "torchtitan"),
        models=(assets,),
        data="texts",
        options={"steps": STEPS, "world_size": gpus},
    )


# GPUs, context parallelism, tensor parallelism; the rest are shards.
CONTEXTS = ((8, 2, 1), (8, 8, 1), (16, 4, 2), (8, 4, 1), (16, 2, 4), (64, 8, 4))


def draw_context(draw: Draw) -> Program:
    """A program with context parallelism, of which one rank runs, of each ring the one that holds most."""
    gpus, ring, tensor = draw.of("layout", CONTEXTS)
    name, flavor, assets = draw.of("model", MODELS[:3])
    tensor = tensor if name == "llama3" else 1
    tables = tables_of(
        (name, flavor, assets),
        batch=draw.of("batch", (1, 2, 1)),
        length=draw.of("length", (8192, 16384, 32768, 16384)),
        parallelism={
            "data_parallel_shard_degree": -1,
            "tensor_parallel_degree": tensor,
            "context_parallel_degree": ring,
            "context_parallel_rotate_method": draw.of("method", ("allgather", "alltoall")),
            "fsdp_reshard_after_forward": draw.of("reshard", ("default", "default", "never")),
        },
        checkpointing=draw.of("checkpointing", CHECKPOINTING),
    )
    return Program(
        files={FILE: written_toml(tables)},
        command=f"{draw.of('launch', LAUNCHES)}python -m torchtitan.train --job.config_file ./{FILE}",
        card=draw.of("card", ("h100-80gb", "h200", "h100-80gb")),
        gpus=min(gpus, 8),
        sized=Sized(FILE, (f"gpus={gpus}",), "torchtitan"),
        models=(assets,),
        data="texts",
        # Ranks of the inner dimensions follow each other: tensor parallelism, then context parallelism.
        options={"steps": STEPS, "world_size": gpus, "rank": tensor * (ring - 2)},
    )


class Experts(NamedTuple):
    """How a model with experts is split.

    Args:
        gpus: of the job.
        tensor: degree of tensor parallelism.
        expert: degree of expert parallelism.
        width: degree of tensor parallelism within experts, for expert parallelism.
    """

    gpus: int
    tensor: int = 1
    expert: int = 1
    width: int = 1


# name, flavor, and the layouts: of DeepSeek's and Qwen3's, of large ones.
SMALL_LAYOUTS = (
    Experts(8),
    Experts(16, expert=8),
    Experts(16, tensor=2, expert=4),
    Experts(8, tensor=2),
    Experts(8, expert=2),
    Experts(16, tensor=2, expert=4, width=2),
    Experts(32, expert=8),
)
LARGE_LAYOUTS = (
    Experts(256, expert=16),
    Experts(128, tensor=4, expert=8, width=4),
    Experts(256),
    Experts(128, tensor=4, expert=16),
)
LLAMA4_LAYOUTS = (
    Experts(64, expert=8),
    Experts(128, tensor=4, expert=8, width=4),
    Experts(32),
    Experts(128, tensor=4, expert=16),
)
EXPERT_MODELS = (
    ("qwen3", "30B-A3B", SMALL_LAYOUTS),
    ("deepseek_v3", "16B", SMALL_LAYOUTS),
    ("qwen3", "30B-A3B", SMALL_LAYOUTS),
    ("llama4", "17bx16e", LLAMA4_LAYOUTS),
    ("deepseek_v3", "16B", SMALL_LAYOUTS),
    ("qwen3", "235B-A22B", LARGE_LAYOUTS),
    ("llama4", "17bx16e", LLAMA4_LAYOUTS),
    ("deepseek_v3", "671B", LARGE_LAYOUTS),
)


def draw_experts(draw: Draw) -> Program:
    """A program of a model with experts: one rank of many, for which all ranks send what it sends itself."""
    name, flavor, layouts = draw.of("model", EXPERT_MODELS)
    split: Experts = draw.of(f"layout of {name} {len(layouts)}", layouts)
    parallelism: dict[str, Any] = {
        "data_parallel_shard_degree": -1,
        "fsdp_reshard_after_forward": draw.of("reshard", ("default", "default", "never", "default"))
        if layouts is SMALL_LAYOUTS
        else "default",
    }
    if split.tensor > 1:
        parallelism["tensor_parallel_degree"] = split.tensor
    if split.expert > 1:
        parallelism |= {"expert_parallel_degree": split.expert, "expert_tensor_parallel_degree": split.width}
    # Experts that are a unit of FSDP2 inside a checkpoint by operator end with an error in torch 2.13.
    checkpointing = CHECKPOINTING[1:] if split.expert > 1 else CHECKPOINTING
    assets = "meta-llama/Llama-3.1-8B"
    tables = tables_of(
        (name, flavor, assets),
        batch=draw.of("batch", (1, 2, 1)),
        length=draw.of("length", (2048, 4096, 2048, 1024)),
        parallelism=parallelism,
        checkpointing=draw.of(f"checkpointing of {len(checkpointing)}", checkpointing),
    )
    tables["optimizer"]["eps"] = 1e-8
    return Program(
        files={FILE: written_toml(tables)},
        command=f"{draw.of('launch', LAUNCHES)}python -m torchtitan.train --job.config_file ./{FILE}",
        card=draw.of("card", ("h200", "h100-80gb", "h200", "a100-80gb")),  # an A100 has no grouped GEMM
        gpus=8,
        sized=Sized(FILE, (f"gpus={split.gpus}",), "torchtitan"),
        models=(assets,),
        data="texts",
        options={"steps": STEPS, "world_size": split.gpus},
        timeout=2400,  # FlexAttention of DeepSeek-V3 is compiled and tuned
    )


FAMILIES = (
    Family("torchtitan", TITAN, draw_program),
    Family("torchtitan-experts", TITAN, draw_experts),
    Family("torchtitan-unsharded", TITAN, draw_unsharded),
    Family("torchtitan-context", TITAN, draw_context),
    Family("torchtitan-pipeline", TITAN, draw_pipeline),
    Family("torchtitan-float8", TITAN_FLOAT8, draw_float8_program),
)
