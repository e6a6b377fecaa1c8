"""axolotl: `axolotl train FILE`, on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.programs.environments import AXOLOTL
from benchmarks.programs.huggingface import ADAPTERS, CARDS, draw_batch, draw_model
from benchmarks.programs.models import LARGE, SMALL, Model
from benchmarks.programs.program import Draw, Family, Program, Sized, written_yaml
from memcalc.catalogue.shipped import find_shipped
from memcalc.spec.finetuning import FUSED_FAMILIES
from memcalc.spec.training import LIGER_FAMILIES

FILE = "config.yaml"
PRECISIONS: tuple[Mapping[str, Any], ...] = (
    {"bf16": "auto"},
    {"bf16": True},
    {"bf16": "auto", "tf32": False},
    {"bf16": True, "tf32": True},  # with fp16 axolotl loads fp16 weights, which its scaler refuses
)
CHECKPOINTING: tuple[Mapping[str, Any], ...] = (
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {},
)
OPTIMIZERS = ("adamw_torch_fused", "adamw_bnb_8bit", "adamw_torch", "paged_adamw_8bit")


# Batches of one length; and kernels, of which axolotl enables all unless a file sets one.
WHOLE: tuple[Mapping[str, Any], ...] = ({"pad_to_sequence_len": True}, {"sample_packing": True})
KERNELS: tuple[Mapping[str, Any], ...] = (
    {},
    {},
    {"lora_mlp_kernel": True},
    {"lora_qkv_kernel": True, "lora_o_kernel": True},
)
TARGETS: tuple[Mapping[str, Any], ...] = (
    {},
    {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    {},
)


def draw_program(draw: Draw) -> Program:
    """A program on one GPU."""
    adapters = draw.of("adapters", ADAPTERS)
    model = draw_model(draw, adapters)
    return written(draw, adapters, model, {"sample_packing": draw.of("packing", (None, True, False))})


def draw_fused(draw: Draw) -> Program:
    """A program with adapters on one GPU, with batches of one length and a model that axolotl's kernels take."""
    adapters = draw.of("adapters", ("qlora", "lora"))
    model = draw.of("model with kernels", [each for each in (*LARGE, *SMALL) if _model_type(each) in FUSED_FAMILIES])
    more = {**draw.of("lengths", WHOLE), **draw.of("kernels", KERNELS), **draw.of("targets", TARGETS)}
    return written(draw, adapters, model, more)


PAIRS: Mapping[str, Any] = {
    "rl": "dpo",
    "datasets": [
        {
            "path": "data/train.jsonl",
            "ds_type": "json",
            "split": "train",
            "type": {"field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"},
        }
    ],
}


def draw_pairs(draw: Draw) -> Program:
    """Preference training on one GPU."""
    adapters = draw.of("adapters", ADAPTERS)
    model = draw_model(draw, adapters)  # longer pairs are dropped
    return replace(written(draw, adapters, model, PAIRS), data=f"pairs-{draw_batch(draw, model).length}")


LIGER: Mapping[str, Any] = {
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    "liger_rope": True,
    "liger_rms_norm": True,
    "liger_glu_activation": True,
    "liger_fused_linear_cross_entropy": True,
}


def draw_quantized(draw: Draw) -> Program:
    """Quantization-aware training of a whole model on one GPU, with Liger's kernels as in axolotl's examples."""
    known = [each for each in SMALL if _model_type(each) in LIGER_FAMILIES]
    scheme = {"activation_dtype": "int8", "weight_dtype": "int4", "group_size": draw.of("group size", (32, 64, 128))}
    model = draw.of("model with Liger's kernels", known)
    return written(draw, "full", model, {**LIGER, "qat": scheme, **draw.of("lengths", WHOLE)})


def _model_type(model: Model) -> str:
    entry = find_shipped(model.hub_id)
    return "" if entry is None else str(entry.config["model_type"])


def written(draw: Draw, adapters: str, model: Model, more: Mapping[str, Any]) -> Program:
    """A program of this model, with further fields."""
    batch = draw_batch(draw, model)
    fields: dict[str, Any] = {
        "base_model": model.hub_id,
        **({"load_in_4bit": True} if adapters == "qlora" else {}),
        "datasets": [{"path": "data/train.jsonl", "ds_type": "json", "type": "alpaca"}],
        "val_set_size": 0.0,
        "output_dir": "./outputs/out",
        **(
            {
                "adapter": adapters,
                "lora_r": draw.of("rank", (8, 16, 32)),
                "lora_alpha": 16,
                "lora_dropout": draw.of("lora dropout", (0.05, 0.0)),
                **({} if "lora_target_modules" in more else {"lora_target_linear": True}),
            }
            if adapters != "full"
            else {}
        ),
        "sequence_len": batch.length,
        **more,
        "gradient_accumulation_steps": draw.of("accumulation", (1, 4, 2)),
        "micro_batch_size": batch.size,
        "num_epochs": 1,
        "optimizer": draw.of("optimizer", OPTIMIZERS),
        "lr_scheduler": "cosine",
        "learning_rate": 0.0002,
        **({"bf16": "auto"} if adapters == "qlora" else draw.of("precision", PRECISIONS)),
        **draw.of("checkpointing", CHECKPOINTING),
        "logging_steps": 1,
        "sdp_attention": True,
        "warmup_steps": 10,
        "save_strategy": "no",
        "weight_decay": 0.0,
        "special_tokens": {"pad_token": "<pad>"},
    }
    return Program(
        files={FILE: written_yaml(fields)},
        command=f"axolotl train {FILE}",
        card=draw.of("card", CARDS),
        sized=Sized(FILE, framework="axolotl"),
        models=(model.hub_id,),
        data="alpaca",
    )


FAMILIES = (
    Family("axolotl", AXOLOTL, draw_program),
    Family("axolotl-lora", AXOLOTL, draw_fused),
    Family("axolotl-dpo", AXOLOTL, draw_pairs),
    Family("axolotl-qat", AXOLOTL, draw_quantized),
)
