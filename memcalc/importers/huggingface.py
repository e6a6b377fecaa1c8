"""Shared by the frameworks around Hugging Face's Trainer: its arguments, and their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.errors import InputError
from memcalc.frameworks.deepspeed import place_adapter_dtype, place_cast, place_copies, runs_deepspeed
from memcalc.frameworks.draft import FRAMEWORK, Draft, is_on
from memcalc.frameworks.trainer import (
    TRAINERS_EVALUATION,
    note_evaluation,
    place_trainers_loop,
    trainer_evaluates,
)
from memcalc.frameworks.trl import (
    note_second_models,
    place_completions,
    place_logits_of_pairs,
    place_reentrant_checkpoints,
    place_trl,
    program_of,
)
from memcalc.frameworks.weights import published_dtype
from memcalc.importers import fsdp, script_fields, trl
from memcalc.importers.accelerate_file import AS_PARTS as LAUNCHED_PARTS
from memcalc.importers.accelerate_file import place_launch
from memcalc.importers.adapters import place_adapters
from memcalc.importers.attention import attention
from memcalc.importers.deepspeed import AS_PARTS
from memcalc.importers.deepspeed_file import place_deepspeed
from memcalc.importers.file_format import (
    COMPILE,
    COMPILE_MODE,
    GPUS,
    LENGTH,
    FileFormat,
    Meaning,
    fact,
    lacking,
    nothing,
    overcounted,
    part,
    to,
)
from memcalc.importers.fsdp import fsdp_version, place_fsdp, place_policy
from memcalc.importers.models import named_model, place_model
from memcalc.importers.offload import place_optimizer

# transformers 5.23, training_args.py (OptimizerNames).
OPTIMIZERS = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw", "adamw_anyprecision"), "adamw"
    ),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adam-8bit"),
    "paged_adamw_32bit": "adamw",
    "paged_adamw": "adamw",
    "adafactor": "adafactor-hf",
    **dict.fromkeys(("adamw_torch_4bit", "adamw_4bit"), "adam-4bit"),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), "lion-8bit"),
    **dict.fromkeys(("lion", "lion_32bit", "paged_lion_32bit"), "lion"),
    "sgd": "sgd",
    "rmsprop": "rmsprop",
    "adagrad": "adagrad",
    "muon": "muon",
}
FUSED = ("adamw_torch_fused", "adamw_apex_fused")
RECOMPUTE = {True: "full", False: "none", "true": "full", "false": "none", "unsloth": "full", "offload": "full"}


# Fields of TrainingArguments (transformers 5.23), and of TRL.
TRAINER: dict[str, Meaning] = {
    **trl.FIELDS,
    "model_name_or_path": named_model(),
    "per_device_train_batch_size": to("training.micro_batch_size"),
    "block_size": to("training.sequence_length"),  # of transformers' examples/pytorch/language-modeling
    "model_max_length": to("training.sequence_length"),  # of FastChat's and others' scripts
    "gradient_accumulation_steps": to("training.gradient_accumulation_steps"),
    **to("training.recompute", RECOMPUTE).at("gradient_checkpointing activation_checkpointing"),
    "bf16": fact("bf16", "precision of the step", reads_auto=True),
    "fp16": fact("fp16", "precision of the step", reads_auto=True),
    **fact("weights", "precision of the weights", reads_auto=True).at("torch_dtype dtype"),
    "optim": fact("optimizer", "training.optimizer"),
    "attn_implementation": attention(),
    "deepspeed": fact("deepspeed", "parallelism.zero_stage"),
    **{f"deepspeed.{path}": meaning for path, meaning in AS_PARTS.items()},
    "fsdp": fact("fsdp", "parallelism.zero_stage"),
    **fsdp.BLOCK,
    "fsdp_transformer_layer_cls_to_wrap": nothing(
        "changes the implementation, not what is saved"
    ),  # until transformers 5
    "fsdp_min_num_params": nothing("changes the implementation, not what is saved"),
    "use_liger_kernel": fact("liger", "training.kernels"),
    "liger_kernel_config": fact("liger_config", "training.kernels"),
    "torch_compile": COMPILE,
    "torch_compile_mode": COMPILE_MODE,
    **nothing().at(
        "neftune_noise_alpha learning_rate lr_scheduler* warmup* weight_decay adam_* num_train_epochs max_steps",
        "seed trust_remote_code ddp_timeout average_tokens_across_devices optim_args",
    ),
    "auto_find_batch_size": overcounted("activations", "a batch size found by trial"),
    **nothing("evaluation is not part of a step").at(
        "per_device_eval_batch_size eval* do_* bf16_full_eval fp16_full_eval batch_eval_metrics",
        "prediction_loss_only greater_is_better metric_for_best_model load_best_model_at_end",
    ),
    "gradient_checkpointing_kwargs": nothing("changes the implementation, not what is saved"),
    "max_grad_norm": fact("clipping", "training.gradient_clipping"),
    **nothing("data").at("dataset* data* remove_unused_columns"),
    **nothing("saving").at("save* hub* push_to_hub output_dir overwrite_output_dir"),
    **nothing("logging").at("logging* log_* report_to run_name report* include_*"),
    "model_revision": nothing("the sizes are the same"),
    "tf32": nothing("fp32 with another method, of the same size"),
    "group_by_length": nothing("sequences are counted as full"),
    "resume_from_checkpoint": nothing("loading is not estimated"),
    "activation_checkpointing_kwargs": nothing("changes the implementation, not what is saved"),
    "optim_target_modules": lacking("GaLore and its variants", overcounts="states"),
    "label_smoothing_factor": lacking("a second copy of the log-probabilities"),
    "parallelism_config*": lacking("parallelism other than data parallelism", overcounts="all"),
    "torch_empty_cache_steps": to("training.empty_cache_steps"),
    **nothing("no effect on the memory of a step").at(
        "accelerator_config* debug disable_tqdm full_determinism ignore_data_skip label_names local_rank project",
        "restore_callback_states_from_checkpoint skip_memory_metrics use_cpu train_sampling_strategy",
        "length_column_name trackio_* use_cache enable_jit_checkpoint ddp_backend ddp_broadcast_buffers",
        "ddp_static_graph",
    ),
    "ddp_find_unused_parameters": part("parallelism.find_unused_parameters"),
    "ddp_bucket_cap_mb": to("parallelism.bucket_cap_mb"),
    "torch_compile_*": nothing("part of torch_compile"),
}


def finish_trainer(
    draft: Draft, *, weights_follow: bool = False, upcast: bool = True, as_published: bool = False
) -> None:
    """Precision, sharding, optimizer and adapters from what was said.

    Args:
        draft: our configuration in the making.
        weights_follow: whether the weights are loaded in the step's precision (axolotl, LLaMA-Factory) or in fp32.
        as_published: whether weights are loaded in the checkpoint's dtype by default (transformers 5).
        upcast: whether weights that train are made fp32 again where nothing shards them (LLaMA-Factory).
    """
    facts = draft.facts
    place_model(draft)
    draft.default("training.implementation", "huggingface")
    _optimizer(draft)
    place_adapters(draft)
    _sharding(draft)
    half = _half(facts)
    autocasts = half is not None
    weights = str(facts.get("weights", "auto" if as_published else "")).rpartition(".")[2]
    if weights == "auto":
        weights = published_dtype(draft, half)
    low = weights in ("bfloat16", "float16", "bf16", "fp16") or (weights_follow and half is not None and not upcast)
    if half is None and draft.facts.get("deepspeed"):  # integrations/deepspeed.py: what is auto is off
        low = False
    if half is None and low:
        half = "bf16" if weights.startswith("b") else "fp16"
    draft.default("training.dtype", half or "fp32")
    policy = place_policy(draft, str(draft.given("training.dtype")) if autocasts else None)
    if half is None:
        draft.default("training.recipe", "fp32")
    elif runs_deepspeed(draft):
        draft.default("training.recipe", "mixed-16")
        place_cast(draft, low=low)
        what = "shards are in fp32 and gathered" if draft.given("parallelism.zero_stage") else "fp32 weights are copied"
        draft.notes.append(f"{what} in 16 bits: recipe mixed-16, 16 bytes per parameter")
        place_adapter_dtype(draft)
    elif draft.values.get("training.finetune") in ("lora", "qlora"):
        # Adapters are in fp32, regardless of the base.
        draft.default("training.recipe", policy or ("amp" if autocasts else "pure"))
        if policy and draft.given("parallelism.engine") == "fsdp1":  # accelerator.py, prepare_model: upcast to fp32
            draft.values["training.recipe"] = policy
        if autocasts and (low or weights_follow) and not _upcasts(draft):
            draft.default("training.lora.base_dtype", "compute")
    else:  # under a policy trained parameters are cast to fp32, regardless of their loaded dtype
        draft.default("training.recipe", policy or ("pure" if low else "amp"))
        if low and autocasts and not policy and draft.given("training.recipe") == "pure":
            draft.default("training.autocast", True)  # accelerator.py, prepare_model: regardless of the weights' dtype
    if low and autocasts and not policy:
        _weight_dtype(draft, weights)
    if policy:
        _place_upcast(draft, policy, weights if low else "float32")
    place_copies(draft)


def _place_upcast(draft: Draft, policy: str, weights: str) -> None:
    """Set what follows from fp32 shards: accelerate casts trained parameters to fp32 (accelerator.py, prepare_model).

    Args:
        draft: the configuration.
        policy: the recipe of FSDP's mixed-precision policy.
        weights: dtype in which the weights are loaded.
    """
    adapted, path = draft.given("training.finetune") in ("lora", "qlora"), "training.lora.adapter_dtype"
    narrow = not adapted or draft.given(path) == "compute"
    if weights != "float32" and narrow and draft.given("parallelism.engine") == "fsdp1":
        draft.default("parallelism.fsdp.load_dtype", "fp16" if weights in ("float16", "fp16") else "bf16")
    if adapted and draft.values["training.recipe"] == policy:
        draft.values[path] = "fp32"


def _half(facts: Mapping[str, Any]) -> str | None:
    """Return the 16-bit dtype of the step; None: there is none.

    Raises:
        InputError: both are set, which TrainingArguments rejects.
    """
    if facts.get("bf16") is True and facts.get("fp16") is True:
        raise InputError("bf16 and fp16 are both true.", "Set one of them.", "fp16")
    return "bf16" if is_on(facts.get("bf16")) else "fp16" if is_on(facts.get("fp16")) else None


def _weight_dtype(draft: Draft, weights: str) -> None:
    """Set the dtype of 16-bit weights, if autocast has another one."""
    held = {"bfloat16": "bf16", "float16": "fp16"}.get(weights, weights)
    pure = draft.given("training.recipe") == "pure" and draft.given("training.autocast")
    frozen = draft.given("training.recipe") == "amp" and draft.given("training.lora.base_dtype") == "compute"
    other = held in ("bf16", "fp16") and held != draft.given("training.dtype")
    if other and (pure or frozen) and not draft.given("parallelism.zero_stage"):
        draft.default("training.weight_dtype", held)


def _upcasts(draft: Draft) -> bool:
    """Whether what is not in 4 bits is cast to fp32 (peft/utils/other.py, prepare_model_for_kbit_training).

    A script around Trainer may call that function or not; TRL's and others' programs are known.
    """
    if draft.values.get(FRAMEWORK) != "trainer" or draft.values.get("training.finetune") != "qlora":
        return False
    what = "whether the script calls PEFT's prepare_model_for_kbit_training"
    return draft.choose("training.lora.base_dtype", what, ("fp32", "compute")) == "fp32"


def _place_storage(draft: Draft, program: str) -> None:
    """Set the dtype that stores 4-bit weights: TRL's programs read it from the file (trl/trainer/model_config.py).

    A script around Trainer may set it; under FSDP1 it has to, because FSDP1 rejects integers.
    """
    path = "training.qlora.quant_storage"
    if program != "trainer":
        draft.default(path, "uint8")
    elif draft.facts.get("fsdp") and fsdp_version(draft) == 2:
        what = "the dtype in which the script stores 4-bit weights (bnb_4bit_quant_storage)"
        draft.default(path, draft.choose(path, what, ("uint8", "compute")))


def _place_matmuls(draft: Draft, program: str) -> None:
    """Set the dtype in which 4-bit layers multiply: one that a script around Trainer sets, or the default, fp32."""
    half, path = _half(draft.facts), "training.qlora.compute_dtype"
    if program == "trainer" and half is not None:
        what = "the dtype in which the script's 4-bit layers multiply (bnb_4bit_compute_dtype)"
        draft.default(path, draft.choose(path, what, (half, "fp32")))


def _optimizer(draft: Draft) -> None:
    name = draft.facts.get("optimizer")
    if name is None:
        draft.default("training.optimizer_implementation", "fused")  # transformers' own default since 4.46
        return
    draft.translate("training.optimizer", name, OPTIMIZERS)
    if name in FUSED:
        draft.default("training.optimizer_implementation", "fused")
    if str(name).startswith("paged_"):
        draft.default("training.optimizer_options.paged", True)


def _sharding(draft: Draft) -> None:
    """Place the sharding of DeepSpeed's file or of FSDP's words."""
    deepspeed, words = draft.facts.get("deepspeed"), draft.facts.get("fsdp")
    if deepspeed:
        stage = place_deepspeed(draft, deepspeed)
        if stage is not None:
            draft.default("parallelism.zero_stage", stage)
            draft.default("parallelism.engine", "deepspeed")
            place_optimizer(draft, draft.facts.get("offload"), draft.facts.get("offload_param"))
            if words:
                draft.notes.append("fsdp is ignored because deepspeed is set too, and transformers uses only one")
            return
    place_fsdp(draft, " ".join(map(str, words)) if isinstance(words, list) else str(words or ""))


def _is_trainer(data: Mapping[str, Any]) -> bool:
    return "per_device_train_batch_size" in data or {"model_name_or_path", "output_dir"} <= data.keys()


def _finish(draft: Draft) -> None:
    place_launch(draft)
    script_fields.place_program(draft)
    program = program_of(draft)
    draft.default(FRAMEWORK, program)
    draft.default("training.micro_batch_size", 8)  # of TrainingArguments
    if program != "trainer":
        place_trl(draft, program)
    if is_on(draft.facts.get("four_bits")):
        draft.default("training.qlora.double_quantization", False)  # BitsAndBytesConfig's default
        _place_storage(draft, program)
        _place_matmuls(draft, program)
    elif draft.overridden.get("training.finetune") != "qlora":
        for path in [path for path in draft.values if path.startswith("training.qlora.")]:
            del draft.values[path]
    draft.facts["pefts_layers"] = True  # scripts hand `lora_target_modules` on to PEFT
    finish_trainer(draft, upcast=False, as_published=program == "trainer" and draft.has("transformers", "5.0"))
    place_trainers_loop(draft)
    if program == "dpo":
        place_logits_of_pairs(draft)
    if program == "grpo":
        place_completions(draft)
    if program != "trainer":
        place_reentrant_checkpoints(draft, program)
    note_second_models(draft)
    asked = trainer_evaluates(draft.given_fields)
    note_evaluation(draft, asked=asked, batch="per_device_eval_batch_size", silent=TRAINERS_EVALUATION)


TRAINING_ARGUMENTS = FileFormat(
    name="Hugging Face TrainingArguments",
    version="transformers 5.23 and TRL 1.16",
    fields={**script_fields.FIELDS, **TRAINER, **LAUNCHED_PARTS},
    finish=_finish,
    recognized=_is_trainer,
    expected=(GPUS, LENGTH),
)
