"""torchtune: `tune run RECIPE --config FILE`, on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.programs.checkpoints import TORCHTUNE
from benchmarks.programs.environments import TUNE, TUNE_QUANTIZED
from benchmarks.programs.huggingface import ADAPTERS, CARDS
from benchmarks.programs.program import STEPS, Draw, Family, Program, Sized, dumped_yaml

FILE = "config.yaml"
MODELS = (("meta-llama/Llama-3.2-1B", "llama3_2_1b"), ("meta-llama/Llama-3.2-3B", "llama3_2_3b"))
ORDER = (  # of a file of the recipes for fine-tuning
    *("output_dir", "model", "tokenizer", "checkpointer", "resume_from_checkpoint", "dataset", "seed", "shuffle"),
    *("batch_size", "optimizer", "optimizer_in_bwd", "loss", "epochs", "max_steps_per_epoch"),
    *("gradient_accumulation_steps", "clip_grad_norm", "compile", "metric_logger", "log_every_n_steps"),
    *("log_peak_memory_stats", "device", "dtype", "enable_activation_checkpointing", "enable_activation_offloading"),
    *("lr_scheduler", "save_adapter_weights_only"),
)
PREFERENCE_LOSSES = (
    {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.1, "label_smoothing": 0},
    {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.05},
    {"_component_": "torchtune.rlhf.loss.RSOLoss", "gamma": 0.1},
)
CHUNKED = "CEWithChunkedOutputLoss"
# The losses of distillation: of tokens, and of the student's logits. The recipe for one GPU wants both in chunks, or
# neither; that for several GPUs compares logits of different shapes without chunks.
DISTILLATION_LOSSES = (
    (f"torchtune.modules.loss.{CHUNKED}", "ForwardKLWithChunkedOutputLoss"),
    (f"torchtune.modules.loss.{CHUNKED}", "ReverseKLWithChunkedOutputLoss"),
    (f"torchtune.modules.loss.{CHUNKED}", "ForwardKLWithChunkedOutputLoss"),
    (f"torchtune.modules.loss.{CHUNKED}", "SymmetricKLWithChunkedOutputLoss"),
    ("torch.nn.CrossEntropyLoss", "ForwardKLLoss"),
)
QUANTIZER = "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"
SCHEDULE = {
    "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "num_warmup_steps": 100,
}
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
    fields = {name: fields[name] for name in ORDER if name in fields}
    recipe = "full_finetune_single_device" if adapters == "full" else "lora_finetune_single_device"
    return program(draw, recipe, fields, (hub_id,), data="alpaca")


def draw_dora(draw: Draw) -> Program:
    """Adapters with magnitudes (DoRA) on one GPU."""
    adapters = draw.of("adapters", ("lora", "qlora", "lora"))
    hub_id, builder = draw.of("model", MODELS)
    model = {**model_of(draw, adapters, builder), "use_dora": True}
    fields = {
        **fields_of(draw, model, hub_id, draw.of("length", (512, 1024, 2048)), adapters),
        **instructions(draw),
        "dtype": "bf16",
    }
    fields = {name: fields[name] for name in ORDER if name in fields}
    settings = ("variable_lengths=false",)
    return program(draw, "lora_finetune_single_device", fields, (hub_id,), data="long-alpaca", settings=settings)


def draw_dpo(draw: Draw) -> Program:
    """Preference training of adapters: the policy without its adapters is the reference."""
    return dpo(draw, draw.of("adapters", ("lora", "qlora", "lora")))


def draw_sharded_dpo(draw: Draw) -> Program:
    """Preference training on two GPUs, of adapters or of a whole model with a reference model."""
    return dpo(draw, draw.of("adapters", ("full", "lora")), gpus=2)


def dpo(draw: Draw, adapters: str, *, gpus: int = 1) -> Program:
    """Preference training; a whole model is trained by the recipe for several GPUs alone."""
    hub_id, builder = draw.of("model", MODELS)
    of_reference = {"ref_checkpointer": checkpointer(hub_id), "lr_scheduler": SCHEDULE} if adapters == "full" else {}
    fields = {
        **fields_of(draw, model_of(draw, adapters, builder), hub_id, draw.of("length", (512, 1024, 256)), adapters),
        **of_reference,
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
    recipe = f"{'full' if adapters == 'full' else 'lora'}_dpo_{'distributed' if gpus > 1 else 'single_device'}"
    return program(draw, recipe, fields, (hub_id,), data="conversations", settings=settings, gpus=gpus)


def draw_distillation(draw: Draw) -> Program:
    """Distillation: adapters of a student learn the logits of a frozen teacher."""
    return distillation(draw, draw.of("adapters", ("lora", "qlora", "lora")))


def draw_sharded_distillation(draw: Draw) -> Program:
    """Distillation on two GPUs, which shard both models."""
    return distillation(draw, "lora", gpus=2)


def distillation(draw: Draw, adapters: str, *, gpus: int = 1) -> Program:
    """Distillation into adapters."""
    hub_id, builder = draw.of("model", MODELS)
    of_teacher, its_builder = draw.of("teacher", MODELS)
    chunks = draw.of("chunks", (None, None, 4, 16))
    losses = [each for each in DISTILLATION_LOSSES if gpus == 1 or CHUNKED in each[0]]
    loss, divergence = draw.of("losses", losses)
    chunked = {"num_output_chunks": chunks} if chunks is not None and CHUNKED in loss else {}
    fields = {
        **fields_of(draw, model_of(draw, adapters, builder), hub_id, draw.of("length", (512, 1024, 2048)), adapters),
        "teacher_model": {"_component_": f"torchtune.models.llama3_2.{its_builder}"},
        "teacher_checkpointer": checkpointer(of_teacher),
        "dataset": alpaca(packed=False),
        "batch_size": draw.of("batch", (2, 4, 1)),
        "loss": {"_component_": loss, **chunked},
        "kd_loss": {"_component_": f"torchtune.modules.loss.{divergence}", **chunked},
        "kd_ratio": 0.5,
        "gradient_accumulation_steps": draw.of("accumulation", (1, 4)),
        "clip_grad_norm": draw.of("clipping", (None, 1.0)),
        "dtype": draw.of("dtype", ("bf16", "bf16", "fp32", "bf16")) if adapters == "lora" else "bf16",
    }
    models = tuple(dict.fromkeys((hub_id, of_teacher)))
    data = draw.of("data", ("long-alpaca", "alpaca"))
    settings = ("variable_lengths=false",) if data == "long-alpaca" else ()
    recipe = f"knowledge_distillation_{'distributed' if gpus > 1 else 'single_device'}"
    return program(draw, recipe, fields, models, data=data, settings=settings, gpus=gpus)


def draw_quantized(draw: Draw) -> Program:
    """Quantization-aware training on two GPUs, of a whole model or of adapters."""
    adapters = draw.of("adapters", ("full", "lora"))
    hub_id, builder = draw.of("model", MODELS)
    fields = {
        **fields_of(draw, model_of(draw, adapters, builder), hub_id, draw.of("length", (512, 1024, 2048)), adapters),
        **instructions(draw),
        "quantizer": {"_component_": QUANTIZER, "groupsize": draw.of("group size", (256, 32, 128))},
        "dtype": draw.of("dtype", ("bf16", "bf16", "fp32", "bf16")) if adapters == "full" else "bf16",
    }
    recipe = "qat_distributed" if adapters == "full" else "qat_lora_finetune_distributed"
    return program(draw, recipe, fields, (hub_id,), data="alpaca", gpus=2)


def instructions(draw: Draw) -> dict[str, Any]:
    """Training on instructions by a chunked cross entropy."""
    return {
        "dataset": alpaca(packed=draw.of("packed", (False, True, False))),
        "batch_size": draw.of("batch", (2, 4, 1)),
        "loss": {"_component_": f"torchtune.modules.loss.{CHUNKED}"},
        "gradient_accumulation_steps": draw.of("accumulation", (1, 4)),
        "clip_grad_norm": draw.of("clipping", (None, 1.0)),
    }


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
        fields["lr_scheduler"] = SCHEDULE
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
    draw: Draw,
    recipe: str,
    fields: Mapping[str, Any],
    models: tuple[str, ...],
    *,
    data: str,
    settings: tuple[str, ...] = (),
    gpus: int = 1,
) -> Program:
    """`tune run RECIPE --config config.yaml`."""
    launched = f"--nproc_per_node {gpus} " if gpus > 1 else ""
    ranks = (f"data_parallel={gpus}",) if gpus > 1 else ()
    return Program(
        files={FILE: dumped_yaml(fields)},
        command=f"tune run {launched}{recipe} --config {FILE}",
        card=draw.of("card", CARDS),
        gpus=gpus,
        sized=Sized(FILE, (*settings, *ranks), framework="torchtune"),
        models=models,
        data=data,
        checkpoint=TORCHTUNE,
        options={"steps": STEPS},
    )


FAMILIES = (
    Family("torchtune", TUNE, draw_program),
    Family("torchtune-dpo", TUNE, draw_dpo),
    Family("torchtune-dpo-fsdp", TUNE, draw_sharded_dpo),
    Family("torchtune-kd", TUNE, draw_distillation),
    Family("torchtune-kd-fsdp", TUNE, draw_sharded_distillation),
    Family("torchtune-dora", TUNE, draw_dora),
    Family("torchtune-qat", TUNE_QUANTIZED, draw_quantized),
)
