"""torchtune's YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memcalc.frameworks.allocator_settings import EXPANDABLE, FIELD
from memcalc.frameworks.context_parallel import place_rotation
from memcalc.frameworks.draft import Draft
from memcalc.frameworks.lengths import place_lengths
from memcalc.frameworks.torchtune import place_torchtune
from memcalc.frameworks.trainer import note_evaluation
from memcalc.importers.file_format import (
    COMPILE,
    GPUS,
    FileFormat,
    Meaning,
    fact,
    lacking,
    nothing,
    overcounted,
    part,
    to,
)
from memcalc.importers.models import preset_of
from memcalc.importers.offload import ACTIVATIONS, place_shards
from memcalc.spec.finetuning import HEAD

_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}

# torchtune 0.6, recipes/configs, recipes/*_finetune_*.py.
FIELDS: dict[str, Meaning] = {
    **fact("model", "model, training.finetune").at("model._component_ policy_model._component_"),
    "batch_size": to("training.micro_batch_size"),
    "gradient_accumulation_steps": to("training.gradient_accumulation_steps"),
    "tokenizer.max_seq_len": to("training.sequence_length"),
    "dtype": to("training.dtype", _DTYPES),
    "optimizer._component_": fact("optimizer", "training.optimizer"),
    "optimizer.fused": fact("fused", "training.optimizer_implementation"),
    "enable_activation_checkpointing": to("training.recompute", {True: "full", False: "none"}),
    "model.lora_rank": to("training.lora.rank"),
    "model.lora_alpha": to("training.lora.alpha"),
    "model.lora_dropout": to("training.lora.dropout"),
    "model.lora_attn_modules": fact("targets", "training.lora.target_modules"),
    "model.apply_lora_to_mlp": fact("mlp", "training.lora.target_modules"),
    "model.apply_lora_to_output": fact("head", "training.lora.target_modules"),
    "model.quantize_base": fact("quantized", "training.finetune"),
    "data_parallel_shard_dim": fact("shards", "parallelism.data_parallel"),
    "data_parallel_replicate_dim": fact("replicas", "parallelism.data_parallel_replicate"),
    "tensor_parallel_dim": to("parallelism.tensor_parallel"),
    "context_parallel_dim": to("parallelism.context_parallel"),
    "context_parallel_rotate_method": fact("rotation", "parallelism.context_parallel_method"),
    "loss._component_": fact("loss", "training.loss"),
    "loss.num_output_chunks": part("training.loss_chunks"),
    **nothing().at("loss* optimizer* lr_scheduler* epochs max_steps_per_epoch seed device name"),
    "model.use_dora": fact("dora", "training.lora.dora"),
    "optimizer_in_bwd": to("training.optimizer_in_backward", {True: True, False: None}),
    "enable_activation_offloading": ACTIVATIONS,
    **fact("offload", "parallelism.offload").at("fsdp_cpu_offload fsdp.cpu_offload"),
    "compile": COMPILE,
    **overcounted("activations", "checkpointing of some layers", "--set recompute= sets it").at("ac_mode ac_option"),
    "quantizer._component_": fact("quantizer", "training.fake_quantization"),
    "quantizer.groupsize": fact("group", "training.fake_quantization_group"),
    "quantizer*": lacking("options of a quantizer"),
    "fake_quant_after_n_steps": nothing("the steps with fake quantization need more memory and are counted"),
    "teacher_model._component_": fact("teacher", "training.teacher"),
    "teacher_model*": lacking("arguments of a teacher"),
    **nothing("loading is not estimated").at(
        "teacher_checkpointer* value_checkpointer* reward_checkpointer* resume_from_checkpoint base_model_path",
        "low_cpu_ram",
    ),
    "kd_loss._component_": fact("divergence", "training.divergence"),
    "kd_loss*": nothing("loss.num_output_chunks must be the same"),
    "kd_ratio": nothing("the weight of a loss"),
    "policy_model*": nothing("the component sets the model"),
    "reward_and_value*": lacking("the reward model and the value model"),
    **fact("reference", "training.reference_model").at("ref_checkpointer* ref_policy_checkpointer*"),
    "ppo_batch_size": fact("ppo_batch", "training.micro_batch_size"),
    **overcounted("states", "frozen layers").at(
        "model.decoder_trainable model.encoder_trainable model.fusion_trainable"
    ),
    "model.image_size": lacking("a vision encoder"),
    **nothing("sharding units; the default is counted").at("custom_sharded_layers memory_efficient_fsdp_wrap"),
    "tensor_parallel_plan*": nothing("changes the implementation only"),
    "fsdp_reshard_after_forward": fact("reshard", "parallelism.zero_stage"),
    "checkpointer*": nothing("loading and saving are not estimated"),
    **nothing("saving").at("save_* keep_last_n_checkpoints enable_async_checkpointing output_dir"),
    **nothing("data").at("tokenizer* dataset* collate_fn* shuffle dataloader*"),
    "dataset.packed": fact("packed", "training.variable_lengths"),
    "packed": fact("all_packed", "training.variable_lengths"),
    **nothing("evaluation is not part of a step").at("batch_size_val run_val_every_n_steps max_validation_batches"),
    "clip_grad_norm": to("training.gradient_clipping"),
    **nothing("logging").at("metric_logger* log_* profiler*"),
    "early_exit_loss*": lacking("early-exit losses"),
    "layer_dropout*": overcounted("activations", "layer dropout"),
    **lacking("reinforcement learning").at("grpo_samples reward_functions"),
    **nothing("part of reinforcement learning").at(
        "forward_batch_size max_generated_tokens ppo_epochs num_steps temperature",
    ),
}

_OPTIMIZERS = {
    **{name: name for name in ("adamw", "adam", "sgd", "adafactor", "rmsprop", "adagrad")},
    "pagedadamw": "adamw",
    "pagedadamw8bit": "adam-8bit",
    "adamw8bit": "adam-8bit",
    "adamw4bit": "adam-4bit",
}
# torchtune 0.6.1 training/quantization.py
_QUANTIZERS = {f"Int8DynActInt4WeightQATQuantizer{suffix}": "int8-int4" for suffix in ("", "ModuleSwap")}
_PROJECTIONS = {"output_proj": "o_proj"}  # names that differ from Hugging Face's
_DIVERGENCES = {
    f"{kind}KL{chunked}Loss": kind.lower()
    for kind in ("Forward", "Reverse", "Symmetric")
    for chunked in ("", "WithChunkedOutput")
}
_MLP = ["gate_proj", "up_proj", "down_proj"]

# "lora_llama3_1_8b": the type, the family with its version, the size and a suffix.
_COMPONENT = re.compile(r"(?:(lora|qlora)_)?(llama3_[123]|qwen2_5|[a-z]+\d*)_(.+)")


def _finish(draft: Draft) -> None:
    facts = draft.facts
    kind = _model(draft)
    draft.default("training.dtype", "bf16")
    _place_batch_of_ppo(draft)
    draft.default("training.recipe", "fp32" if draft.values["training.dtype"] == "fp32" else "pure")
    if kind is not None:
        _adapters(draft, quantized=kind == "qlora" or facts.get("quantized") is True)
    place_torchtune(draft)
    place_rotation(draft, facts.get("rotation"))
    place_lengths(draft, packs=any(draft.facts.get(name) is True for name in ("packed", "all_packed")))
    draft.notes.append("torchtune's own modules are not modelled: counted as plain modules with flash attention")
    named = facts.get("optimizer")
    if isinstance(named, str):
        name = named.rpartition(".")[2].lower()
        draft.translate("training.optimizer", name, _OPTIMIZERS)
        if name.startswith("paged"):
            draft.default("training.optimizer_options.paged", True)
    if facts.get("fused") is True:
        draft.default("training.optimizer_implementation", "fused")
    elif facts.get("fused") is False:  # torch/optim/adam.py: foreach is the default if neither is set
        draft.default("training.optimizer_implementation", "for-loop")
    _sharding(draft)
    # recipes/full_finetune_distributed.py: the updates of sharded parameters are not modelled
    if draft.values.get("training.optimizer_in_backward") and draft.given("parallelism.zero_stage"):
        del draft.values["training.optimizer_in_backward"]
        draft.limit(
            "an optimizer that steps within backward",
            "all gradients are counted",
            holds_memory=False,
            overcounts="states",
        )
    if FIELD not in draft.overridden:  # torchtune/__init__.py since June 2025, after the last release, 0.6.1
        draft.notes.append(
            "torchtune 0.6.1 leaves the allocator's settings alone, and its main branch has expandable segments: "
            f"--set alloc_conf={EXPANDABLE}"
        )
    _place_fake_quantization(draft)
    _place_teacher(draft)
    _note_other_models(draft)
    steps = draft.given_fields.get("run_val_every_n_steps")
    note_evaluation(draft, asked=type(steps) is int and steps > 0, batch="batch_size_val")


def _place_batch_of_ppo(draft: Draft) -> None:
    """Set the sequences of one forward and backward: a part of batch_size (ppo_full_finetune_single_device.py)."""
    size, parts = draft.facts.get("ppo_batch"), draft.given_fields.get("gradient_accumulation_steps", 1)
    if type(size) is int and type(parts) is int and 0 < parts <= size:
        draft.values["training.micro_batch_size"] = size // parts


def _place_fake_quantization(draft: Draft) -> None:
    """Set fake quantization (recipes/qat_distributed.py, qat_lora_finetune_distributed.py)."""
    quantizer = draft.facts.get("quantizer")
    if quantizer is None:
        return
    name = str(quantizer).rpartition(".")[2]
    if name not in _QUANTIZERS:
        draft.limit(f"quantization-aware training with {name}", holds_memory=True)
        return
    draft.default("training.fake_quantization", _QUANTIZERS[name])
    group = draft.facts.get("group")
    if group is not None:
        draft.default("training.fake_quantization_group", group)
    draft.notes.append(
        "fake quantization is counted as in torchao 0.12 and later; until 0.11 it saved three bytes per element less"
    )


def _place_teacher(draft: Draft) -> None:
    """Set the teacher of distillation, a frozen model in the dtype of the run."""
    component = draft.facts.get("teacher")
    if component is None:
        return
    preset, _ = _built_by(str(component))
    divergence = _DIVERGENCES.get(str(draft.facts.get("divergence")).rpartition(".")[2])
    if preset is None or divergence is None:
        what = "the teacher" if preset is None else "the divergence from a teacher"
        draft.limit(what, "neither its weights nor its logits are counted", holds_memory=True)
        return
    draft.default("training.teacher", {"preset": preset, "fused_qkv": False})
    draft.default("training.divergence", divergence)


def _note_other_models(draft: Draft) -> None:
    """Record the memory that other preference training, reinforcement learning and checkpointing of layers add.

    recipes/ppo_full_finetune_single_device.py: the reference is a second copy of the policy in the same dtype.
    """
    loss = str(draft.given_fields.get("loss._component_", ""))
    if "ppo_batch" in draft.facts:
        draft.limit("reinforcement learning", "completions are generated and scored", holds_memory=True)
    elif loss.startswith("torchtune.rlhf.loss.") and not draft.values.get("training.pairs"):
        draft.limit("pairs of sequences", "chosen and rejected are twice the batch", holds_memory=True)
    if "reference" in draft.facts and not draft.values.get("training.reference_model"):
        draft.limit("the reference model", "a frozen copy of the policy", holds_memory=True, bytes_per_parameter=2)
    if draft.values.get("training.recompute") == "full" and {"ac_mode", "ac_option"} & draft.given_fields.keys():
        draft.limit("checkpointing of some layers", "all are counted as recomputed", holds_memory=True)


def _model(draft: Draft) -> str | None:
    """Return the model that the component builds, and "lora" or "qlora" if it also builds adapters."""
    component = str(draft.facts.get("model", "")).rpartition(".")[2]
    preset, kind = _built_by(component)
    if preset is not None:
        draft.values["preset"] = preset
        draft.notes.append(f"using the preset {preset} for the model {component}")
    else:
        draft.unknown_model = component
    return kind


def _built_by(component: str) -> tuple[str | None, str | None]:
    """Return the preset of the model that a component builds, and "lora" or "qlora"; None: there is none."""
    match = _COMPONENT.fullmatch(component.rpartition(".")[2])
    if match is None:
        return None, None
    family = re.sub(r"(\d)_(\d)", r"\1.\2", match[2])
    size = re.sub(r"(\d)_(\d)", r"\1.\2", match[3]).replace("_", "-")
    name = re.sub(r"^(llama|gemma|phi)(\d)", r"\1-\2", f"{family}-{size}")
    return preset_of(name), match[1]


def _adapters(draft: Draft, *, quantized: bool) -> None:
    draft.values["training.finetune"] = "qlora" if quantized else "lora"
    if draft.values["training.recipe"] == "pure":  # recipes/lora_finetune_*.py: built in the run's dtype, and checked
        draft.default("training.lora.adapter_dtype", "compute")
    if draft.facts.get("dora") is True:
        draft.default("training.lora.dora", True)
    targets = draft.facts.get("targets")
    if isinstance(targets, list):
        wanted = [_PROJECTIONS.get(str(name), str(name)) for name in targets]
        wanted += _MLP if draft.facts.get("mlp") is True else []
        draft.values["training.lora.target_modules"] = wanted + ([HEAD] if draft.facts.get("head") is True else [])


def _sharding(draft: Draft) -> None:
    """Set FSDP2 for the distributed recipes, which shard fully; the launcher sets the number of GPUs."""
    facts = draft.facts
    shards, replicas = facts.get("shards"), facts.get("replicas")
    if type(shards) is int and shards > 0:
        several = replicas if type(replicas) is int else 1
        draft.values["parallelism.data_parallel"] = shards * several
        if several > 1:
            draft.values["parallelism.data_parallel_replicate"] = several
    if {"parallelism.data_parallel"} & (draft.values.keys() | draft.overridden.keys()):
        draft.default("parallelism.zero_stage", 2 if facts.get("reshard") is False else 3)
        draft.default("parallelism.engine", "fsdp2")
        if draft.given("parallelism.engine") == "fsdp2" and facts.get("reshard") is not False:
            draft.default("parallelism.fsdp.reshard_root", True)
    if facts.get("offload") is True:
        place_shards(draft)


def _recognized(data: Mapping[str, Any]) -> bool:
    model = data.get("model", data.get("policy_model"))
    trains = "optimizer" in data  # recipes that generate or evaluate do not
    return trains and isinstance(model, Mapping) and str(model.get("_component_", "")).startswith("torchtune.")


_EXPECTED = (GPUS, ("training.sequence_length", "the sequence length"))
TORCHTUNE = FileFormat("torchtune", "0.6", FIELDS, _finish, _recognized, _EXPECTED, framework="torchtune")
