"""torchtune: `tune run RECIPE --config FILE`, on one GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.programs.checkpoints import TORCHTUNE
from benchmarks.programs.environments import TUNE
from benchmarks.programs.huggingface import ADAPTERS, CARDS
from benchmarks.programs.program import STEPS, Draw, Family, Program, Sized, dumped_yaml

FILE = "config.yaml"
MODELS = (("meta-llama/Llama-3.2-1B", "llama3_2_1b"), ("meta-llama/Llama-3.2-3B", "llama3_2_3b"))
ATTENTION = (["q_proj", "v_proj", "output_proj"], ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "output_proj"])


def draw_program(draw: Draw) -> Program:
    """A program on one GPU."""
    adapters = draw.of("adapters", ADAPTERS)
    hub_id, builder = draw.of("model", MODELS)
    prefix = {"full": "", "lora": "lora_", "qlora": "qlora_"}[adapters]
    model: dict[str, Any] = {"_component_": f"torchtune.models.llama3_2.{prefix}{builder}"}
    if adapters != "full":
        model |= {
            "lora_attn_modules": draw.of("attention", ATTENTION),
            "apply_lora_to_mlp": draw.of("mlp", (True, False)),
            "lora_rank": draw.of("rank", (64, 8, 16)),
            "lora_alpha": 128,
            "lora_dropout": 0.0,
        }
    in_backward = adapters == "full" and draw.of("in backward", (False, True, False))
    fields: dict[str, Any] = {
        "output_dir": "out",
        "model": model,
        "tokenizer": {
            "_component_": "torchtune.models.llama3.llama3_tokenizer",
            "path": f"checkpoints/{hub_id}/original/tokenizer.model",
            "max_seq_len": draw.of("length", (512, 1024, 2048)),
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": f"checkpoints/{hub_id}",
            "checkpoint_files": ["model.safetensors"],
            "recipe_checkpoint": None,
            "output_dir": "${output_dir}",
            "model_type": "LLAMA3_2",
        },
        "resume_from_checkpoint": False,
        "dataset": {
            "_component_": "torchtune.datasets.alpaca_dataset",
            "source": "data",
            "split": "train",
            "packed": draw.of("packed", (False, False, True)),
        },
        "seed": None,
        "shuffle": True,
        "batch_size": draw.of("batch", (2, 4, 1)),
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5, "fused": draw.of("fused", (True, False))},
        "optimizer_in_bwd": in_backward,
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "epochs": 1,
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": 1 if in_backward else draw.of("accumulation", (1, 4)),
        "clip_grad_norm": None if in_backward else draw.of("clipping", (None, 1.0)),
        "compile": False,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": "${output_dir}/logs",
        },
        "log_every_n_steps": 1,
        "log_peak_memory_stats": True,
        "device": "cuda",
        "dtype": draw.of("dtype", ("bf16", "bf16", "fp32", "bf16")) if adapters == "full" else "bf16",
        "enable_activation_checkpointing": draw.of("checkpointing", (False, True)),
        "enable_activation_offloading": False,
    }
    if adapters != "full":
        fields.pop("optimizer_in_bwd")
        fields["lr_scheduler"] = {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 100,
        }
        fields["save_adapter_weights_only"] = False
    recipe = "full_finetune_single_device" if adapters == "full" else "lora_finetune_single_device"
    return Program(
        files={FILE: dumped_yaml(fields | {"seed": 1234})},
        command=f"tune run {recipe} --config {FILE}",
        card=draw.of("card", CARDS),
        sized=Sized(FILE, framework="torchtune"),
        models=(hub_id,),
        data="alpaca",
        checkpoint=TORCHTUNE,
        options={"steps": STEPS},
    )


FAMILIES = (Family("torchtune", TUNE, draw_program),)
