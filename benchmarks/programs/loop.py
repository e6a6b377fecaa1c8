"""A training loop of one's own, in the manner of nanoGPT. memcalc is given a description in its own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.programs.environments import HF5
from benchmarks.programs.huggingface import CARDS
from benchmarks.programs.program import STEPS, Draw, Family, Program, Sized, script, written_yaml

FILE = "memcalc.yaml"

SIZES = ((12, 12, 768), (24, 16, 1024), (6, 6, 384), (36, 20, 1280), (12, 12, 768), (24, 16, 2048))  # l, h, d
BATCHES = ((12, 1024), (4, 2048), (8, 1024), (16, 512), (2, 4096), (8, 1024))
PRECISIONS = ("bfloat16", "bfloat16", "pure", "float16", "bfloat16", "float32", "pure", "bfloat16")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "pure": "bf16"}
RECIPES = {"bfloat16": "amp", "float16": "amp", "float32": "fp32", "pure": "pure"}


def draw_program(
    draw: Draw, sizes: Sequence[tuple[int, int, int]] = SIZES, numbers_of_gpus: Sequence[int] = (1, 1, 1, 2)
) -> Program:
    """A program on one GPU, or on two by DDP."""
    layers, heads, hidden = draw.of("size", sizes)
    batch, length = draw.of("batch", BATCHES)
    precision = draw.of("precision", PRECISIONS)
    vocabulary = draw.of("vocabulary", (50304, 50257, 50304, 32000))
    gpus = draw.of("gpus", numbers_of_gpus)
    accumulation = draw.of("accumulation", (5, 1, 4, 2))  # in all: the script shares it out over ranks
    clip = draw.of("clipping", (1.0, 0.0, 1.0))
    dropout = draw.of("dropout", (0.0, 0.0, 0.1))
    switches = {
        "bias": draw.of("bias", (False, True)),
        "fused": draw.of("fused", (True, False, True)),
        "checkpointing": draw.of("checkpointing", (False, False, True)),
        "pure": precision == "pure",
    }
    words = {
        "n_layer": layers,
        "n_head": heads,
        "n_embd": hidden,
        "block_size": length,
        "vocab_size": vocabulary,
        "batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "dropout": dropout,
        "grad_clip": clip,
        "dtype": "bfloat16" if precision == "pure" else precision,
    }
    options = [f"--{name}={value}" for name, value in words.items()]
    options += [f"--{name}" for name, value in switches.items() if value]
    described: dict[str, Any] = {
        "name": "nanogpt",
        "model": {
            "architecture": "gpt2",
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "vocab_size": vocabulary,
            "max_position_embeddings": length,
            **({} if switches["bias"] else dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), False)),
            **({} if switches["bias"] else {"norm_bias": False}),
        },
        "training": {
            "micro_batch_size": batch,
            "sequence_length": length,
            "gradient_accumulation_steps": max(1, accumulation // gpus),
            "dtype": DTYPES[precision],
            "recipe": RECIPES[precision],
            "optimizer": "adamw",
            "optimizer_implementation": "fused" if switches["fused"] else "foreach",
            "recompute": "full" if switches["checkpointing"] else "none",
            "attention": "flash",
            "dropout": dropout,
            **({"gradient_clipping": clip} if clip else {}),
        },
        **({"parallelism": {"data_parallel": gpus}} if gpus > 1 else {}),
    }
    launcher = f"torchrun --nproc_per_node {gpus}" if gpus > 1 else "python"
    return Program(
        files={FILE: written_yaml(described), "train.py": script("loop.py")},
        command=f"{launcher} train.py {' '.join(options)}",
        card=draw.of("card", CARDS),
        gpus=gpus,
        sized=Sized(FILE, (), "loop"),
        models=(),
        data="",
        options={"steps": STEPS},
    )


FAMILIES = (Family("loop", HF5, draw_program),)
