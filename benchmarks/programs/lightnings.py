"""Lightning: a LightningModule around a model of transformers. memcalc is given a description in its own words."""

from __future__ import annotations

from typing import Any

from benchmarks.programs.environments import HF5
from benchmarks.programs.huggingface import CARDS, draw_batch
from benchmarks.programs.program import Draw, Family, Program, Sized, script, written_yaml
from benchmarks.programs.ranks import models_on

FILE = "memcalc.yaml"
RECIPES = {
    "bf16-mixed": ("bf16", "amp"),
    "16-mixed": ("fp16", "amp"),
    "bf16-true": ("bf16", "pure"),
    "32-true": ("fp32", "fp32"),
}
PRECISIONS = ("bf16-mixed", "bf16-true", "bf16-mixed", "32-true", "16-mixed", "bf16-true")


def draw_program(draw: Draw) -> Program:
    """A program on one GPU, or on two by DDP."""
    gpus = draw.of("gpus", (1, 1, 1, 2))
    model = draw.of(f"model on {gpus} GPUs", models_on(gpus, large=False))
    batch = draw_batch(draw, model)
    precision = draw.of("precision", PRECISIONS)
    fused = draw.of("fused", (False, True))
    clip = None if fused and precision.endswith("mixed") else draw.of("clipping", (None, 1.0))
    accumulation = draw.of("accumulation", (1, 4, 2))
    checkpointing = draw.of("checkpointing", (False, True, False))
    words = {
        "model": model.hub_id,
        "batch_size": batch.size,
        "length": batch.length,
        "precision": precision,
        "accumulate_grad_batches": accumulation,
        **({"gradient_clip_val": clip} if clip else {}),
        **({"devices": gpus, "strategy": "ddp"} if gpus > 1 else {}),
    }
    options = " ".join(f"--{name} {value}" for name, value in words.items())
    options += checkpointing * " --gradient_checkpointing" + fused * " --fused"
    dtype, recipe = RECIPES[precision]
    described: dict[str, Any] = {
        "name": "lightning",
        "preset": model.hub_id,
        "training": {
            "micro_batch_size": batch.size,
            "sequence_length": batch.length,
            "gradient_accumulation_steps": accumulation,
            "dtype": dtype,
            "recipe": recipe,
            "implementation": "huggingface",
            "optimizer": "adamw",
            "optimizer_implementation": "fused" if fused else "foreach",
            "recompute": "full" if checkpointing else "none",
            **({"gradient_clipping": clip} if clip else {}),
        },
        **({"parallelism": {"data_parallel": gpus}} if gpus > 1 else {}),
    }
    return Program(
        files={FILE: written_yaml(described), "train.py": script("lightnings.py")},
        command=f"python train.py {options}",
        card=draw.of("card", CARDS),
        gpus=gpus,
        sized=Sized(FILE, framework="lightning"),
        models=(model.hub_id,),
        data="",
    )


FAMILIES = (Family("lightning", HF5, draw_program),)
