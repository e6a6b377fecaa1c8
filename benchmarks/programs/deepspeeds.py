"""DeepSpeed's own loop: `deepspeed.initialize` with a JSON file, over 2 or 4 ranks, or one rank of 8.

The programs of `deepspeed-stage0` are without ZeRO; those of `deepspeed-pipeline` have stages of a GPT, which
DeepSpeed's pipeline engine runs, and those of `deepspeed-pipeline-precisions` the same stages in other precisions, with
and without ZeRO.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.programs.environments import HF5_DEEPSPEED
from benchmarks.programs.huggingface import CARDS, draw_batch
from benchmarks.programs.program import STEPS, Draw, Family, Program, Sized, script
from benchmarks.programs.ranks import ALONE, models_on

FILE = "ds_config.json"
PRECISIONS: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"bf16": {"enabled": True}}, "bfloat16"),
    ({"bf16": {"enabled": True}}, "float32"),
    ({"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}, "float16"),
    ({"bf16": {"enabled": True}}, "bfloat16"),
    ({}, "float32"),
)
OPTIMIZERS: tuple[Mapping[str, Any], ...] = (
    {"type": "AdamW", "params": {"lr": 2e-5, "torch_adam": True}},
    {"type": "AdamW", "params": {"lr": 2e-5, "torch_adam": True, "weight_decay": 0.1}},
)


def draw_program(draw: Draw, *, stages: Sequence[int]) -> Program:
    """A program of 2 to 8 ranks, at one of some ZeRO stages."""
    gpus = draw.of("gpus", (2, ALONE, 2, ALONE, 4))
    model = draw.of(f"model on {gpus} GPUs", models_on(gpus, large=False))
    batch = draw_batch(draw, model)
    stage = draw.of("stage", stages)
    precision, loaded = draw.of("precision", PRECISIONS)
    checkpointing = draw.of("checkpointing", (False, True, False))
    zero = {
        "stage": stage,
        "reduce_bucket_size": draw.of("bucket", (5e8, 2e8, 5e7)),
        "allgather_bucket_size": 2e8,
        "overlap_comm": draw.of("overlap", (True, False)),
        "contiguous_gradients": True,
    }
    config = {
        "train_micro_batch_size_per_gpu": batch.size,
        "gradient_accumulation_steps": draw.of("accumulation", (1, 4, 2)),
        "gradient_clipping": 1.0,
        "steps_per_print": 100,
        "optimizer": draw.of("optimizer", OPTIMIZERS),
        **precision,
        "zero_optimization": zero,
    }
    options = f"--model {model.hub_id} --dtype {loaded} --seq_length {batch.length} --deepspeed_config {FILE}"
    options += checkpointing * " --gradient_checkpointing"
    alone = gpus == ALONE
    settings = (f"preset={model.hub_id}", f"data_parallel={gpus}", f"s={batch.length}")
    return Program(
        files={FILE: json.dumps(config, indent=2) + "\n", "train.py": script("deepspeeds.py")},
        command=f"{'python' if alone else f'deepspeed --num_gpus {gpus}'} train.py {options}",
        card=draw.of("card", CARDS),
        gpus=gpus,
        sized=Sized(FILE, settings + (("recompute=full",) if checkpointing else ()), "deepspeed"),
        models=(model.hub_id,),
        data="",
        options={"random_weights": True, "steps": STEPS, **({"world_size": gpus} if alone else {})},
    )


PIPELINES = ((2, 2), (4, 4), (4, 2), (2, 1))  # GPUs and stages
SIZES = ((8, 1024, 16), (12, 768, 12), (10, 1280, 20))  # layers, hidden size, heads
PARTITIONS = (("type:transformer", "layers"), ("type:transformer|embedding", "layers-and-ends"))
HALVES: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"fp16": {"enabled": True, "initial_scale_power": 16}}, "float16"),
    ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "bfloat16"),
    ({"fp16": {"enabled": True, "initial_scale_power": 16}}, "float16"),
)


OTHERS: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"bf16": {"enabled": True}}, "bfloat16"),
    ({}, "float32"),
    ({"fp16": {"enabled": True, "initial_scale_power": 16}}, "float16"),
)
OWN_BUFFER = "torch.empty(size, args.seq_length, args.hidden_size, dtype=dtype, device=engine.device)"
SHARED_BUFFER = "engine._allocate_or_extend_buffers(0, [size, args.seq_length, args.hidden_size], dtype)"


def draw_pipeline(
    draw: Draw,
    *,
    layouts: Sequence[tuple[int, int]] = PIPELINES,
    precisions: Sequence[tuple[Mapping[str, Any], str]] = HALVES,
    zero_stages: Sequence[int] = (1,),
    receives_in: str = OWN_BUFFER,
) -> Program:
    """A GPT on 1 to 4 stages.

    The null device cannot tell a stage the shape of what it receives, so the script allocates the buffer: one of its
    own, or with SHARED_BUFFER the one that DeepSpeed allocates, in which a stage receives gradients, too.
    """
    (gpus, stages), (layers, hidden, heads) = draw.of("layout", layouts), draw.of("size", SIZES)
    method, split = draw.of("partition", PARTITIONS)
    precision, dtype = draw.of("precision", precisions)
    length, vocabulary = draw.of("length", (1024, 2048, 512)), draw.of("vocabulary", (50304, 32000))
    dropout, checkpointing = draw.of("dropout", (0.1, 0.0)), draw.of("checkpointing", (True, True, False))
    batch, batches = draw.of("batch", (2, 4, 1)), draw.of("micro-batches", (8, 4, 1, 16))
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": batches,
        "gradient_clipping": 1.0,
        "steps_per_print": 100,
        "optimizer": OPTIMIZERS[0],
        **precision,
        "zero_optimization": {
            "stage": draw.of("stage", zero_stages),
            "reduce_bucket_size": draw.of("bucket", (5e8, 5e7)),
        },
    }
    options = f"--num_layers {layers} --hidden_size {hidden} --num_heads {heads} --vocab_size {vocabulary}"
    options += f" --seq_length {length} --stages {stages} --dropout {dropout} --dtype {dtype}"
    options += f" --partition_method '{method}' --deepspeed_config {FILE}"
    options += checkpointing * " --checkpoint_activations"
    settings = (
        *(f"num_layers={layers}", f"hidden_size={hidden}", f"num_attention_heads={heads}", f"vocab_size={vocabulary}"),
        *(f"s={length}", f"max_position_embeddings={length}", f"dropout={dropout}", "implementation=plain"),
        *(f"pipeline_parallel={stages}", f"data_parallel={gpus // stages}", f"pipeline_split={split}"),
        *("pipeline_tensors=hidden-states", "logits_dtype=fp32", "logits_until=backward"),
        f"recompute={'full' if checkpointing else 'none'}",
    )
    return Program(
        files={
            FILE: json.dumps(config, indent=2) + "\n",
            "train.py": script("pipelines.py").replace(OWN_BUFFER, receives_in),
        },
        command=f"deepspeed --num_gpus {gpus} train.py {options}",
        card=draw.of("card", CARDS),
        gpus=gpus,
        sized=Sized(FILE, settings, "deepspeed"),
        models=(),
        data="",
        options={"steps": STEPS},
    )


FAMILIES = (
    Family("deepspeed", HF5_DEEPSPEED, partial(draw_program, stages=(0, 1, 2, 3, 2, 3, 1))),
    Family("deepspeed-stage0", HF5_DEEPSPEED, partial(draw_program, stages=(0,))),
    Family("deepspeed-pipeline", HF5_DEEPSPEED, draw_pipeline),
    Family(
        "deepspeed-pipeline-precisions",
        HF5_DEEPSPEED,
        partial(
            draw_pipeline,
            layouts=((2, 2), (3, 3), (4, 2)),
            precisions=OTHERS,
            zero_stages=(1, 0),
            receives_in=SHARED_BUFFER,
        ),
    ),
)
