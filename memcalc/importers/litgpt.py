"""LitGPT's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.frameworks.draft import Draft
from memcalc.frameworks.lengths import place_lengths
from memcalc.frameworks.litgpt import place_4_bits, place_adapters, place_evaluation, place_litgpt
from memcalc.importers.file_format import GPUS, LENGTH, FileFormat, Meaning, fact, lacking, nothing, part, to
from memcalc.importers.models import named_model, place_model

# LitGPT 0.5, litgpt/finetune, litgpt/pretrain.py, litgpt/args.py.
FIELDS: dict[str, Meaning] = {
    "checkpoint_dir": named_model("checkpoints/"),  # the directory of `litgpt download`
    "model_name": named_model(),
    "precision": fact("precision", "training.recipe: precision of weights and step", reads_auto=True),
    "quantize": fact("quantize", "training.finetune"),
    "devices": fact("devices", "parallelism.data_parallel"),
    "num_nodes": fact("nodes", "parallelism.data_parallel"),
    "train.micro_batch_size": to("training.micro_batch_size"),
    "train.global_batch_size": to("training.global_batch_size"),
    "train.max_seq_length": to("training.sequence_length"),
    "train.max_norm": to("training.gradient_clipping"),
    "train.tie_embeddings": to("model.tie_word_embeddings"),
    "lora_r": to("training.lora.rank"),
    "lora_alpha": to("training.lora.alpha"),
    "lora_dropout": to("training.lora.dropout"),
    "lora_query": fact("q_proj", "training.lora.target_modules"),
    "lora_key": fact("k_proj", "training.lora.target_modules"),
    "lora_value": fact("v_proj", "training.lora.target_modules"),
    "lora_projection": fact("o_proj", "training.lora.target_modules"),
    "lora_mlp": fact("mlp", "training.lora.target_modules"),
    "lora_head": fact("head", "training.lora.target_modules"),
    **lacking("GaLore", overcounts="states").at("galore.use_galore galore.galore_8bit"),
    "galore*": nothing("part of GaLore"),
    "optimizer": fact("optimizer", "training.optimizer"),
    "optimizer.class_path": part("training.optimizer"),
    **nothing().at("optimizer.init_args* seed access_token"),
    **{
        f"train.{name}": nothing()
        for name in (
            *("epochs", "max_steps", "max_tokens", "max_time", "min_lr", "lr_*", "log_interval"),
            *("save_interval", "weight_decay", "beta1", "beta2", "learning_rate"),
        )
    },
    "eval*": nothing("every run evaluates, a micro-batch at a time, before its first step and between steps"),
    **nothing("data").at("data* tokenizer_dir"),
    "out_dir": nothing("saving"),
    **nothing("logging").at("log* ops_profile"),
    **nothing("loading is not estimated").at("resume initial_checkpoint_dir"),
    "model_config*": lacking("sizes of a custom model"),
}

_OPTIMIZERS = {
    "adamw": "adamw",
    "adam": "adam",
    "adamw8bit": "adam-8bit",
    "pagedadamw": "adamw",
    "pagedadamw32bit": "adamw",
    "pagedadamw8bit": "adam-8bit",
    "sgd": "sgd",
}
_RECIPES = {
    "bf16-true": ("bf16", "pure"),
    "bf16-mixed": ("bf16", "amp"),
    "16-true": ("fp16", "pure"),
    "16-mixed": ("fp16", "amp"),
    "32-true": ("fp32", "fp32"),
}


def _finish(draft: Draft) -> None:
    facts = draft.facts
    place_model(draft)
    dtype, recipe = _RECIPES.get(str(facts.get("precision", "bf16-true")), ("bf16", "pure"))
    draft.default("training.dtype", dtype)
    draft.default("training.recipe", recipe)
    fine_tunes = "checkpoint_dir" in draft.given_fields
    _optimizer(draft)
    if not fine_tunes:  # litgpt/pretrain.py
        draft.default("training.optimizer_implementation", "fused")
        draft.default("training.compile", True)
    adapts = any(path.startswith("lora_") for path in draft.given_fields)
    draft.default("training.micro_batch_size", 1 if fine_tunes else 4)
    place_litgpt(draft, adapters=adapts)
    place_evaluation(draft, fine_tunes=fine_tunes)
    place_lengths(draft, packs=not fine_tunes)
    devices, nodes = facts.get("devices"), facts.get("nodes", 1)
    gpus = devices * nodes if type(devices) is int and type(nodes) is int else None
    if gpus is not None:
        draft.default("parallelism.data_parallel", gpus)
    if adapts:
        _adapters(draft)
    if gpus is not None and gpus > 1:
        _sharding(draft, nodes, recipe)


def _sharding(draft: Draft, nodes: int, recipe: str) -> None:
    """Set FSDP1 with blocks as units; fine-tuning checkpoints blocks, pretraining replicates shards across nodes.

    Lightning 2.6 fabric/strategies/fsdp.py, FSDPStrategy: original parameters, and torch's prefetch in backward;
    fabric/plugins/precision/fsdp.py: mixed precision gathers and reduces in 16 bits; no_backward_sync is no_sync.
    """
    draft.default("parallelism.zero_stage", 3)
    if draft.given("training.finetune") in ("lora", "qlora"):  # frozen weights in a trained unit get gradients, too
        draft.default("parallelism.engine", "fsdp2")
        draft.limit("FSDP1 with adapters", "FSDP2 is counted", holds_memory=True)
    else:
        draft.default("parallelism.engine", "fsdp1")
    if draft.given("parallelism.engine") == "fsdp1":
        draft.default("parallelism.fsdp.use_orig_params", True)
        draft.default("parallelism.fsdp.gradient_sync", "last")
        if recipe == "amp":
            for role in ("param_dtype", "reduce_dtype"):
                draft.default(f"parallelism.fsdp.{role}", draft.given("training.dtype"))
    if "checkpoint_dir" in draft.given_fields:  # litgpt/finetune/full.py, lora.py
        draft.default("training.recompute", "full")
    elif nodes > 1:  # litgpt/pretrain.py: HYBRID_SHARD
        draft.default("parallelism.data_parallel_replicate", nodes)


def _optimizer(draft: Draft) -> None:
    named = draft.facts.get("optimizer")
    path = named.get("class_path", "") if isinstance(named, Mapping) else named
    if isinstance(path, str) and path:
        name = path.rpartition(".")[2]
        draft.translate("training.optimizer", name, _OPTIMIZERS)
        if name.lower().startswith("paged"):
            draft.default("training.optimizer_options.paged", True)
    draft.default("training.optimizer", "adamw")


def _adapters(draft: Draft) -> None:
    facts = draft.facts
    # litgpt/finetune/lora.py: query and value by default
    wanted = [
        name for name in ("q_proj", "k_proj", "v_proj", "o_proj") if facts.get(name, name in ("q_proj", "v_proj"))
    ]
    place_adapters(draft, wanted, mlp=bool(facts.get("mlp")), head=bool(facts.get("head")))
    # adapters have the dtype of the weights: Fabric's precisions "bf16-true" and bitsandbytes
    draft.default("training.lora.rank", 8)
    if draft.values["training.recipe"] == "pure":
        draft.default("training.lora.adapter_dtype", "compute")
    kind = str(facts.get("quantize") or "").removeprefix("bnb.")
    if kind.startswith(("nf4", "fp4")):
        draft.values["training.finetune"] = "qlora"
        draft.values["training.qlora.quantization"] = kind[:3]
        draft.values["training.qlora.quantize_lm_head"] = True  # Fabric's plugin replaces every nn.Linear
        draft.values["training.qlora.double_quantization"] = kind.endswith("-dq")
        place_4_bits(draft)
    else:
        draft.values["training.finetune"] = "lora"
        if kind:
            draft.limit(
                f"a base in {kind}", "a base in the run's dtype is counted", holds_memory=False, overcounts="precision"
            )
    if kind and draft.values["training.optimizer"] == "adamw":  # utils.py: replaced by bitsandbytes' PagedAdamW
        draft.values["training.optimizer_options.paged"] = True


def _recognized(data: Mapping[str, Any]) -> bool:
    return isinstance(data.get("train"), Mapping) and any(key in data for key in ("checkpoint_dir", "model_name"))


LITGPT = FileFormat("LitGPT", "0.5", FIELDS, _finish, _recognized, (GPUS, LENGTH), framework="litgpt")
