"""torchtune: `tune run RECIPE --config FILE`, on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.programs.checkpoints import TORCHTUNE
from benchmarks.programs.environments import TUNE
from benchmarks.programs.huggingface import ADAPTERS, CARDS
from benchmarks.programs.program import STEPS, Draw, Family, Program, Sized, dumped_yaml

FILE = "config.yaml"
MODELS = (("meta-llama/Llama-3.2-1B", "llama3_2_1b"), ("meta-llama/Llama-3.2-3B", "llama3_2_3b"))
PREFERENCE_LOSSES = (
    {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.1, "label_smoothing": 0},
    {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.05},
    {"_component_": "torchtune.rlhf.loss.RSOLoss", "gamma": 0.1},
)
DIVERGENCES = ("ForwardKLWithChunkedOutputLoss",)
ATTENTION = (["q_proj", "v_proj", "output_proj"], ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "output_proj"])


def draw_program(draw: Draw) -> Program:
    """A program on one GPU."""
    adapters = draw.of("adapters", ADAPTERS)
    hub_id, builder = draw.of("model", MODELS)
    in_backward = adapters == "full" and draw.of("in backward", (False, True, False))
    model = model_of(draw, adapters, builder)
    fields = {
        **fields_of(draw, model, hub_id, draw.of("length", (512, 1024, 2048)), adapters),
        "dataset": alpaca(packed=draw.of("packed", (False, False, True))),
        "batch_size": draw.of("batch", (2, 4, 1)),
        "optimizer_in_bwd": in_backward,
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "gradient_accumulation_steps": 1 if in_backward else draw.of("accumulation", (1, 4)),
        "clip_grad_norm": None if in_backward else draw.of("clipping", (None, 1.0)),
        "dtype": draw.of("dtype", ("bf16", "bf16", "fp32", "bf16")) if adapters == "full" else "bf16",
    }
    if adapters != "full":
        fields.pop("optimizer_in_bwd")
    recipe = "full_finetune_single_device" if adapters == "full" else "lora_finetune_single_device"
    return program(draw, recipe, fields, (hub_id,), data="alpaca")


def draw_dpo(draw: Draw) -> Program:
    """Preference training of adapters: the policy without its adapters is the reference."""
    adapters = draw.of("adapters", ("lora", "qlora", "lora"))
    hub_id, builder = draw.of("model", MODELS)
    fields = {
        **fields_of(draw, model_of(draw, adapters, builder), hub_id, draw.of("length", (512, 1024, 256)), adapters),
        "dataset": {
            "_component_": "torchtune.datasets.preference_dataset",
            "source": "data",
            "split": "train",
        },
        "batch_size": draw.of("batch", (2, 4, 1)),
        "loss": draw.of("loss", PREFERENCE_LOSSES),
        "gradient_accumulation_steps": draw.of("accumulation", (1, 4)),
        "dtype": draw.of("dtype", ("bf16", "bf16", "fp32", "bf16")) if adapters == "lora" else "bf16",
    }
    settings = ("variable_lengths=false",)  # the chosen answers are longer than the longest sequence
    return program(draw, "lora_dpo_single_device", fields, (hub_id,), data="conversations", settings=settings)


def draw_distillation(draw: Draw) -> Program:
    """Distillation: adapters of a student learn the logits of a frozen teacher."""
    adapters = draw.of("adapters", ("lora", "qlora", "lora"))
    hub_id, builder = draw.of("model", MODELS)
    of_teacher, its_builder = draw.of("teacher", MODELS)
    chunks = draw.of("chunks", (None, None, 4, 16))
    chunked = {} if chunks is None else {"num_output_chunks": chunks}
    fields = {
        **fields_of(draw, model_of(draw, adapters, builder), hub_id, draw.of("length", (512, 1024, 2048)), adapters),
        "teacher_model": {"_component_": f"torchtune.models.llama3_2.{its_builder}"},
        "teacher_checkpointer": checkpointer(of_teacher),
        "dataset": alpaca(packed=False),
        "batch_size": draw.of("batch", (2, 4, 1)),
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss", **chunked},
        "kd_loss": {"_component_": f"torchtune.modules.loss.{draw.of('divergence', DIVERGENCES)}", **chunked},
        "kd_ratio": 0.5,
        "gradient_accumulation_steps": draw.of("accumulation", (1, 4)),
        "clip_grad_norm": draw.of("clipping", (None, 1.0)),
        "dtype": draw.of("dtype", ("bf16", "bf16", "fp32", "bf16")) if adapters == "lora" else "bf16",
    }
    models = tuple(dict.fromkeys((hub_id, of_teacher)))
    data = draw.of("data", ("long-alpaca", "alpaca"))
    settings = ("variable_lengths=false",) if data == "long-alpaca" else ()
    return program(draw, "knowledge_distillation_single_device", fields, models, data=data, settings=settings)


def model_of(draw: Draw, adapters: str, builder: str) -> dict[str, Any]:
    """The block of a model that trains."""
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
    return model


def fields_of(draw: Draw, model: Mapping[str, Any], hub_id: str, length: int, adapters: str) -> dict[str, Any]:
    """The fields that all recipes have, except those of the batch and the loss."""
    fields: dict[str, Any] = {
        "output_dir": "out",
        "model": dict(model),
        "tokenizer": {
            "_component_": "torchtune.models.llama3.llama3_tokenizer",
            "path": f"checkpoints/{hub_id}/original/tokenizer.model",
            "max_seq_len": length,
        },
        "checkpointer": checkpointer(hub_id),
        "resume_from_checkpoint": False,
        "seed": 1234,
        "shuffle": True,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5, "fused": draw.of("fused", (True, False))},
        "epochs": 1,
        "max_steps_per_epoch": None,
        "compile": False,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": "${output_dir}/logs",
        },
        "log_every_n_steps": 1,
        "log_peak_memory_stats": True,
        "device": "cuda",
        "enable_activation_checkpointing": draw.of("checkpointing", (False, True)),
        "enable_activation_offloading": False,
    }
    if adapters != "full":
        fields["lr_scheduler"] = {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 100,
        }
        fields["save_adapter_weights_only"] = False
    return fields


def checkpointer(hub_id: str) -> dict[str, Any]:
    """The block that loads a model."""
    return {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": f"checkpoints/{hub_id}",
        "checkpoint_files": ["model.safetensors"],
        "recipe_checkpoint": None,
        "output_dir": "${output_dir}",
        "model_type": "LLAMA3_2",
    }


def alpaca(*, packed: bool) -> dict[str, Any]:
    """The block of instructions with answers."""
    component = "torchtune.datasets.alpaca_dataset"
    return {"_component_": component, "source": "data", "split": "train", "packed": packed}


def program(
    draw: Draw, recipe: str, fields: Mapping[str, Any], models: tuple[str, ...], *, data: str, **more: Any
) -> Program:
    """`tune run RECIPE --config config.yaml`."""
    return Program(
        files={FILE: dumped_yaml(fields)},
        command=f"tune run {recipe} --config {FILE}",
        card=draw.of("card", CARDS),
        sized=Sized(FILE, more.get("settings", ()), framework="torchtune"),
        models=models,
        data=data,
        checkpoint=TORCHTUNE,
        options={"steps": STEPS},
    )


FAMILIES = (
    Family("torchtune", TUNE, draw_program),
    Family("torchtune-dpo", TUNE, draw_dpo),
    Family("torchtune-kd", TUNE, draw_distillation),
)
