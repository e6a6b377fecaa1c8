"""LitGPT: `litgpt finetune_full|finetune_lora --config FILE`, on one GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.programs.checkpoints import LITGPT
from benchmarks.programs.environments import LITGPT_05
from benchmarks.programs.huggingface import ADAPTERS, CARDS
from benchmarks.programs.program import STEPS, Draw, Family, Program, Sized, written_yaml

FILE = "config.yaml"
MODELS = (
    "EleutherAI/pythia-160m",
    "EleutherAI/pythia-410m",
    "meta-llama/Llama-3.2-1B",
    "HuggingFaceTB/SmolLM2-135M",
    "HuggingFaceTB/SmolLM2-360M",
)
PRECISIONS = ("bf16-true", "bf16-true", "bf16-mixed", "32-true", "bf16-true")
TARGETS: tuple[dict[str, bool], ...] = (
    {},
    {"lora_key": True, "lora_projection": True, "lora_mlp": True, "lora_head": False},
    {"lora_mlp": True},
)


def draw_program(draw: Draw, *, head: bool = False) -> Program:
    """A program on one GPU; `head`: one with adapters, and one of them on the LM head."""
    adapters = draw.of("adapters", ("lora", "qlora") if head else ADAPTERS)
    model = draw.of("model", MODELS)
    size = draw.of("batch", (1, 2, 4, 1))
    accumulation = draw.of("accumulation", (1, 4, 2))
    fields: dict[str, Any] = {
        "checkpoint_dir": f"checkpoints/{model}",
        "out_dir": "out/finetune",
        "precision": "bf16-true" if adapters == "qlora" else draw.of("precision", PRECISIONS),
        "devices": 1,
        **({"quantize": draw.of("quantization", ("bnb.nf4", "bnb.nf4-dq"))} if adapters == "qlora" else {}),
        **({"lora_r": draw.of("rank", (8, 32, 16)), "lora_alpha": 16} if adapters != "full" else {}),
        **(draw.of("targets", TARGETS) if adapters != "full" else {}),
        **({"lora_head": True} if head else {}),
        "data": {
            "class_path": "litgpt.data.JSON",
            "init_args": {"json_path": "data", "mask_prompt": False, "prompt_style": "alpaca", "num_workers": 0},
        },
        "train": {
            "save_interval": 1000,
            "log_interval": 1,
            "global_batch_size": size * accumulation,
            "micro_batch_size": size,
            "lr_warmup_steps": 10,
            "epochs": 1,
            "max_seq_length": draw.of("length", (512, 1024, 2048)),
        },
        "eval": {"interval": 100, "max_new_tokens": 32, "max_iters": 2, "initial_validation": False},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.0002, "weight_decay": 0.0}},
        "logger_name": "csv",
        "seed": 1337,
    }
    return Program(
        files={FILE: written_yaml(fields)},
        command=f"litgpt finetune_{'full' if adapters == 'full' else 'lora'} --config {FILE}",
        card=draw.of("card", CARDS),
        sized=Sized(FILE, framework="litgpt"),
        models=(model,),
        data="alpaca",
        checkpoint=LITGPT,
        options={"steps": STEPS},
    )


FAMILIES = (
    Family("litgpt", LITGPT_05, draw_program),
    Family("litgpt-head", LITGPT_05, partial(draw_program, head=True)),
)
