"""LLaMA-Factory's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.frameworks.allocator_settings import EXPANDABLE, place_allocator_settings
from memcalc.frameworks.draft import Draft, is_on
from memcalc.frameworks.trainer import (
    TRAINERS_EVALUATION,
    note_evaluation,
    place_trainers_loop,
    trainer_evaluates,
)
from memcalc.importers import float8
from memcalc.importers.accelerate_file import AS_PARTS, place_launch
from memcalc.importers.attention import WORDS, attention
from memcalc.importers.file_format import GPUS, FileFormat, Meaning, fact, lacking, nothing, overcounted, part, to
from memcalc.importers.huggingface import TRAINER, finish_trainer

# LLaMA-Factory 0.9.6, src/llamafactory/hparams.
FIELDS: dict[str, Meaning] = {
    **TRAINER,
    **AS_PARTS,
    "finetuning_type": to("training.finetune", {"full": "full", "lora": "lora"}),
    "stage": fact("stage", "training.finetune"),
    "cutoff_len": to("training.sequence_length"),
    "lora_rank": to("training.lora.rank"),
    "lora_target": fact("targets", "training.lora.target_modules"),
    "quantization_bit": fact("bits", "training.finetune"),
    "quantization_method": nothing("bitsandbytes is counted"),
    "double_quantization": to("training.qlora.double_quantization"),
    "quantization_type": to("training.qlora.quantization", {"nf4": "nf4", "fp4": "fp4"}),
    "flash_attn": attention({word: WORDS[word] for word in ("fa2", "fa3", "sdpa", "auto", "disabled")}),
    "disable_gradient_checkpointing": to("training.recompute", {True: "none", False: "full"}),
    "pure_bf16": fact("pure", "training.recipe"),
    "upcast_layernorm": lacking("norms in fp32"),
    "upcast_lmhead_output": lacking("a second fp32 copy of the logits"),
    "enable_liger_kernel": fact("liger", "training.kernels"),
    "use_kt": overcounted("all", "experts offloaded to the CPU by KTransformers"),
    "kt_*": nothing("part of KTransformers"),
    "fp8": float8.FLAG,
    "fp8_backend": fact("fp8_backend", "training.fp8"),
    "fp8_enable_fsdp_float8_all_gather": nothing("only logged"),
    "fp8_*": nothing("part of fp8"),
    "use_adam_mini": overcounted("states", "Adam-mini"),
    "use_muon": fact("muon", "training.optimizer"),
    "use_v1_kernels": overcounted(
        "activations", "fused kernels", "they exist for NPUs only"
    ),  # v1/plugins/.../interface.py
    **lacking("Megatron under LLaMA-Factory", overcounts="all").at(
        "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size sequence_parallel",
        "context_parallel_size use_distributed_optimizer recompute_granularity bias_activation_fusion",
        "apply_rope_fusion overlap_* moe_* use_packed_sequences mixed_precision use_mca use_megatron_bridge",
    ),
    "use_unsloth": overcounted("activations", "Unsloth's kernels"),
    "use_galore": lacking("GaLore", overcounts="states"),
    "use_apollo": lacking("APOLLO", overcounts="states"),
    "use_badam": overcounted("states", "BAdam"),
    "use_dora": lacking("DoRA"),
    **lacking("a custom loss").at("use_asft_loss use_dft_loss use_eaft_loss"),
    **nothing("part of a custom loss").at("asft_* eaft_alpha"),
    "mixture_of_depths": lacking("mixture of depths", overcounts="activations"),
    "galore_*": nothing("part of GaLore"),
    "apollo_*": nothing("part of APOLLO"),
    "badam_*": nothing("part of BAdam"),
    **nothing().at("loraplus_* ray_* shift_attn"),
    **nothing("initialization of adapters").at("pissa_* create_new_adapter"),
    **nothing("part of OFT").at("oft_* module_dropout"),
    "additional_target": fact("additional", "training.lora.modules_to_save"),
    "use_llama_pro": overcounted("states", "LLaMA Pro, which trains only its added layers"),
    "megatron_*": nothing("part of Megatron under LLaMA-Factory"),
    "use_hyper_parallel": lacking("HyperParallel under LLaMA-Factory", overcounts="all"),
    "hyper_parallel_*": nothing("part of HyperParallel"),
    "ref_model*": lacking("a second model"),
    "reward_model*": lacking("a reward model"),
    "ppo_*": nothing("part of reinforcement learning"),
    **nothing("part of preference training").at("dpo_* kto_* simpo_* pref_*"),
    "block_diag_attn": nothing("sequences are counted as full"),
    **part("training.variable_lengths").at("packing neat_packing"),
    "use_unsloth_gc": overcounted("activations", "Unsloth's checkpoints, which are offloaded to the CPU"),
    "use_reentrant_gc": nothing("changes the implementation, not what is saved"),
    **nothing("some rows of the embedding").at("resize_vocab add_* new_special_tokens_config init_special_tokens"),
    "use_rslora": nothing("scaling of adapters"),
    "train_from_scratch": nothing("initialization of weights"),
    **nothing("data").at(
        "media_dir train_on_prompt streaming buffer_size mix_strategy interleave_probs preprocessing_batch_size",
        "ignore_pad_token_for_loss tool_format default_system enable_thinking preserve_thinking tokenized_path",
        "crop_to_patches use_audio_in_video audio_sampling_rate disable_shuffling split_special_tokens",
        "use_fast_tokenizer template max_samples overwrite_cache preprocessing_num_workers image_* video_*",
        "mask_history",
    ),
    **nothing("not part of training").at(
        "task task_dir batch_size lang n_shot download_mode infer_* vllm_* sglang_* num_beams max_new_tokens",
        "length_penalty skip_special_tokens export_* use_kv_cache cache_dir hf_hub_token ms_hub_token om_hub_token",
        "print_param_status low_cpu_mem_usage offload_folder compute_accuracy early_stopping_steps extra_config",
        "adapter_folder swanlab_* use_swanlab enable_torch_profiler profiler_* master_addr master_port",
        "quantization_device_map device_map",
    ),
    "predict_with_generate": nothing("part of evaluation"),
    "freeze_*": overcounted("states", "frozen layers"),
    "plot_loss": nothing("logging"),
    "val_size": nothing("evaluation is not part of a step"),
    "adapter_name_or_path": nothing("loading is not estimated"),
    "rope_scaling": nothing("positions are computed, not stored"),
}


def _finish(draft: Draft) -> None:
    place_launch(draft)
    facts = draft.facts
    if facts.get("bits") == 4:
        draft.values["training.finetune"] = "qlora"
    elif facts.get("bits"):
        what = f"a base in {facts['bits']} bits"
        draft.limit(what, "a base in the run's dtype is counted", holds_memory=False, overcounts="precision")
    else:
        for path in [path for path in draft.values if path.startswith("training.qlora.")]:
            del draft.values[path]
    # hparams/finetuning_args.py: adapters of rank 8 on every linear layer by default
    draft.default("training.finetune", "lora")
    if draft.values["training.finetune"] in ("lora", "qlora"):
        draft.default("training.lora.rank", 8)
        facts.setdefault("targets", "all")
        named = facts.get("additional")
        if named:
            modules = named if isinstance(named, list) else [name.strip() for name in str(named).split(",")]
            draft.default("training.lora.modules_to_save", modules)
    _precision(draft)
    if facts.get("muon") is True:
        facts["optimizer"] = "muon"
    draft.default("training.micro_batch_size", 8)  # TrainingArguments' own
    # model/model_utils/checkpointing.py: on unless it is disabled
    draft.default("training.recompute", "full")
    # model/adapter.py: weights that train are cast up to fp32 unless pure_bf16, ZeRO 3 or FSDP
    finish_trainer(draft, weights_follow=True, upcast=not facts.get("pure"))
    place_trainers_loop(draft)
    ranks = draft.values.get("parallelism.data_parallel", 1)
    if ranks != 1 or "parallelism.data_parallel" in draft.overridden:
        # launcher.py at 0.9.5 (cli.py at 0.9.3): only for several GPUs, unless OPTIM_TORCH=0
        place_allocator_settings(draft, EXPANDABLE, "llamafactory-cli")
    _note_stage(draft)
    asked = trainer_evaluates(draft.given_fields)
    note_evaluation(draft, asked=asked, batch="per_device_eval_batch_size", silent=TRAINERS_EVALUATION)
    if facts.get("fp8") is True:  # train/fp8_utils.py, create_fp8_kwargs
        backend = facts.get("fp8_backend", "auto")
        if backend in ("auto", "torchao"):
            float8.multiply_in_8_bits(draft, "rowwise", skip=["lm_head"])
        else:
            draft.limit(f"FP8 matmuls by {backend}", holds_memory=True)


def _note_stage(draft: Draft) -> None:
    """Memory of stages beyond the policy: train/trainer_utils.py, create_ref_model; train/{dpo,kto,ppo,rm}/workflow.py.

    The reference is a copy of the policy in the run's dtype, or another model; below adapters there is none.
    """
    stage, fields = str(draft.facts.get("stage")), draft.given_fields
    if stage in ("dpo", "rm"):
        draft.limit("pairs of sequences", f"stage {stage} has twice the micro-batch", holds_memory=True)
    elif stage in ("kto", "ppo"):
        draft.limit(f"the other forward passes of stage {stage}", holds_memory=True)
    refers = stage in ("kto", "ppo") or (stage == "dpo" and fields.get("pref_loss") not in ("orpo", "simpo"))
    if refers and "ref_model" not in draft.given_fields and draft.values["training.finetune"] == "full":
        draft.limit(f"the reference model of stage {stage}", holds_memory=True, bytes_per_parameter=2)


def _precision(draft: Draft) -> None:
    """model/patcher.py, model/adapter.py: weights where neither bf16 nor fp16 casts a step.

    pure_bf16 keeps all that trains in bf16, but for adapters, which PEFT casts to fp32 (peft/tuners/tuners_utils.py,
    cast_adapter_dtype). By default a base below adapters is in the checkpoint's dtype,
    and what trains is cast up to fp32.
    """
    facts, adapted = draft.facts, draft.values["training.finetune"] in ("lora", "qlora")
    if facts.get("pure") is True:
        facts["weights"] = "bfloat16"
    elif adapted and not is_on(facts.get("bf16")) and not is_on(facts.get("fp16")):
        facts.setdefault("weights", "auto")


def _recognized(data: Mapping[str, Any]) -> bool:
    return "model_name_or_path" in data and any(key in data for key in ("finetuning_type", "cutoff_len", "lora_target"))


LLAMA_FACTORY = FileFormat("LLaMA-Factory", "0.9.6", FIELDS, _finish, _recognized, (GPUS,), framework="llama-factory")
