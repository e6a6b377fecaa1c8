"""axolotl's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.errors import InputError
from memcalc.frameworks.allocator_settings import EXPANDABLE, place_allocator_settings
from memcalc.frameworks.axolotl import (
    place_fp32_modules,
    place_fused_adapters,
    place_loading_of_adapters,
    place_packed_samples,
)
from memcalc.frameworks.context_parallel import place_rotation
from memcalc.frameworks.draft import Draft, is_on
from memcalc.frameworks.trainer import note_evaluation, place_trainers_loop
from memcalc.frameworks.trl import place_adapters_in_bf16, place_logits_of_pairs, place_reentrant_checkpoints
from memcalc.frameworks.weights import placed_config
from memcalc.importers import float8
from memcalc.importers.attention import EAGER, FLASH, SDPA, WORDS, attention
from memcalc.importers.file_format import (
    COMPILE,
    COMPILE_MODE,
    GPUS,
    FileFormat,
    Meaning,
    fact,
    lacking,
    noted,
    nothing,
    overcounted,
    part,
    to,
)
from memcalc.importers.huggingface import RECOMPUTE, TRAINER, finish_trainer
from memcalc.importers.models import named_model
from memcalc.importers.offload import ACTIVATIONS
from memcalc.spec.model_families.field_types import shown

_CHECKPOINTS = {**RECOMPUTE, "offload_disk": "full"}

_PREFERENCES = ("dpo", "ipo", "orpo", "simpo", "kto", "grpo", "gdpo", "ebft")  # axolotl 0.19 utils/schemas/enums.py
_QAT_GROUP = 32  # utils/schemas/quantization.py
_DPO = ("dpo", "ipo")  # of these, those that TRL's DPOTrainer runs
_OTHER_LOSS = ("orpo_*", "simpo_*", "cpo_*", "kto_*", "dpo_*", "rpo_*")


def _checkpoint(draft: Draft, value: Any) -> None:
    draft.translate("training.recompute", value, _CHECKPOINTS)
    if value in ("offload", "offload_disk", "unsloth"):
        draft.limit(
            f"gradient_checkpointing: {value}",
            "its checkpoints leave the device",
            holds_memory=False,
            overcounts="activations",
        )


# axolotl 0.18, src/axolotl/utils/schemas/config.py and its neighbors.
FIELDS: dict[str, Meaning] = {
    **{name: meaning for name, meaning in TRAINER.items() if name not in ("optim", "dtype", "torch_dtype")},
    "base_model": named_model(),
    "micro_batch_size": to("training.micro_batch_size"),
    "sequence_len": to("training.sequence_length"),
    "optimizer": fact("optimizer", "training.optimizer"),
    "adapter": to("training.finetune", {"lora": "lora", "qlora": "qlora", "": None}),
    "lora_target_linear": fact("all_linear", "training.lora.target_modules"),
    "lora_target_modules": fact("targets", "training.lora.target_modules"),
    "lora_modules_to_save": to("training.lora.modules_to_save"),
    "gradient_checkpointing": Meaning("mapped", "training.recompute", _checkpoint),
    "flash_attention": attention({True: FLASH, False: None}),
    "sdp_attention": attention({True: SDPA, False: None}),
    "xformers_attention": attention({True: WORDS["xformers"], False: None}),
    "eager_attention": attention({True: EAGER, False: None}),
    "attention": attention(),
    "attn_implementation": attention(),
    "tensor_parallel_size": to("parallelism.tensor_parallel"),
    "context_parallel_size": to("parallelism.context_parallel"),
    "sequence_parallel_degree": to("parallelism.context_parallel"),  # its name until 0.12
    "flex_attention": attention({True: FLASH, False: None}),
    "bfloat16": fact("bfloat16", "precision of the weights", reads_auto=True),
    "float16": fact("float16", "precision of the weights", reads_auto=True),
    "float32": fact("float32", "precision of the weights", reads_auto=True),
    "dp_shard_size": to("parallelism.data_parallel"),
    "dp_replicate_size": fact("replicas", "parallelism.data_parallel_replicate"),
    "fsdp_version": part("parallelism.fsdp"),
    "load_in_8bit": overcounted("precision", "an 8-bit base"),
    "liger_fused_linear_cross_entropy": fact("liger_fused_linear_cross_entropy", "training.loss"),
    **{name: fact(name, "training.kernels") for name in ("liger_rms_norm", "liger_rope", "liger_glu_activation")},
    "liger_*": overcounted("activations", "other Liger kernels"),
    "cut_cross_entropy": fact("cut_cross_entropy", "training.loss"),
    "max_grad_norm": fact("clipping", "training.gradient_clipping"),
    "chunked_cross_entropy": overcounted("activations", "a chunked loss"),
    **{name: part("training.lora.fused") for name in ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")},
    "activation_offloading": ACTIVATIONS,
    "torch_compile": COMPILE,
    "torch_compile_mode": COMPILE_MODE,
    "fp8": float8.FLAG,
    "fp8_enable_fsdp_float8_all_gather": float8.GATHER,
    "qat.activation_dtype": fact("qat_inputs", "training.fake_quantization"),
    "qat.weight_dtype": fact("qat_weights", "training.fake_quantization"),
    "qat.group_size": fact("qat_group", "training.fake_quantization_group"),
    "qat.fake_quant_after_n_steps": nothing("the steps with fake quantization need more memory and are counted"),
    "qat.quantize_embedding": lacking("a fake-quantized embedding"),
    "quantization*": nothing("a model is quantized after training"),
    **overcounted("states", "frozen layers").at("unfrozen_parameters freeze_*"),
    "use_kernels": noted("kernels from the hub"),
    **overcounted("activations", "expert kernels").at("use_scattermoe use_sonicmoe"),
    "experts_implementation": lacking("expert kernels", known=("grouped_mm", "scattermoe", "sonicmoe")),
    **overcounted("precision", "quantized experts").at("quantize_moe_experts dsv4_*"),
    "lora_target_parameters": lacking("adapters on stacked experts"),
    "gptq": overcounted("precision", "a GPTQ base"),
    "expert_parallel_size": lacking("expert parallelism", overcounts="all"),
    "trl*": noted("the loss of preference training or reinforcement learning"),
    "ebft*": lacking("the loss of EBFT"),
    **overcounted("activations", "fused kernels around attention").at("flash_attn_* fused_attn_kernel"),
    "tiled_mlp": overcounted("activations", "a tiled MLP"),
    "gemma4_hybrid_attn_impl": lacking("two attention kernels"),
    "model_quantization_config*": overcounted("precision", "a quantized base"),
    "bnb_config_kwargs*": overcounted("precision", "other quantization"),
    "llama4_linearized_experts": lacking("expert kernels"),
    **lacking("changes of the model's own config.json").at("model_config* overrides_of_model_*"),
    "reward_model": lacking("pairs of sequences", "a reward model has twice the micro-batch"),
    "vllm*": lacking("generation between steps"),
    "diffusion*": lacking("the loss of diffusion models"),
    "use_onebitllms": lacking("1-bit weights", overcounts="all"),
    "sage_attention": lacking("8-bit attention"),
    "large_head_attention": lacking("attention kernels"),
    "sdpa_varlen": part("training.repeat_kv"),
    "flash_optimum": overcounted("activations", "BetterTransformer kernels"),
    "s2_attention": lacking("shifted sparse attention", overcounts="activations"),
    "scaling_softmax*": lacking("attention with a scaled softmax"),
    "selective_checkpointing": lacking("per-operator checkpointing", overcounts="activations"),
    "recompute_layer_types": lacking("checkpointing of some layer types"),
    "layer_offloading": overcounted("all", "layers offloaded to the CPU"),
    "offload": overcounted("all", "tensors offloaded to the CPU"),
    **nothing("saving").at("dynamic_checkpoint* saves_per_epoch"),
    "fp32_norms": lacking("norms in fp32"),
    "fp32_norm_classes": nothing("part of fp32_norms"),
    "embeddings_skip_upcast": part("training.lora.fp32_on_load"),
    "deepcompile": lacking("DeepSpeed's compiler"),
    "lora_embedding_kernel": overcounted("activations", "fused kernels of adapters"),
    "lora_rank_pattern": lacking("adapters with different ranks"),
    "peft_layers_*": overcounted("states", "adapters in some layers"),
    "peft_layer_replication": lacking("duplicated layers"),
    "peft_trainable_token_indices": lacking("trained rows of the embedding"),
    "peft_autocast_adapter_dtype": overcounted("states", "a separate precision of adapters"),
    "relora*": lacking("ReLoRA", overcounts="states"),
    "lisa_*": overcounted("states", "LISA, which trains some layers at a time"),
    "qgalore_*": lacking("Q-GaLore", overcounts="all"),
    "dion_*": lacking("Dion"),
    **nothing().at(
        "embedding_lr* hf_use_auth_token accelerator_config* eta_min loss_watchdog_* lora_fan_in_fan_out num_epochs",
        "strict early_stopping_patience local_rank debug lr_* cosine_* ddp*",
    ),
    **nothing("changes the implementation only").at("heads_k_stride ring_attn_func"),
    "max_packed_sequence_len": nothing("sequence_len is counted"),
    "center_rewards_coefficient": nothing("part of a reward model"),
    "gc_steps": fact("emptied_caches", "training.empty_cache_steps"),
    "gc_collect_steps": overcounted("activations", "cached blocks freed before some steps"),
    "precompute_ref_log_probs": overcounted("all", "precomputed log-probabilities of the reference model"),
    **{name: noted("a custom loss") for name in _OTHER_LOSS},
    **dict.fromkeys(("process_reward_model", "use_eaft", "eaft_*"), lacking("a custom loss")),
    "feature_layers": nothing("part of a custom loss"),
    **nothing("initialization or scaling of adapters").at(
        "loftq_config* lora_alpha_pattern peft_use_rslora peft_init_lora_weights loraplus_* peft* lora_on_cpu",
        "merge_lora merge_method qlora_sharded_model_loading",
    ),
    **nothing("data").at(
        "excess_length_strategy max_prompt_len pad_to_multiple_of curriculum_sampling streaming*",
        "multipack_real_batches batch_flattening use_pose pose_* pretrain_multipack_* role_*",
        "pretraining_sample_concatenation shuffle_before_merging_datasets num_dataset_shards_to_save",
        "push_dataset_to_hub added_tokens_overrides default_system_message is_preprocess image_*",
        "preprocess_iterable total_* fix_untrained_tokens processor_kwargs chat_template_* shrink_embeddings",
        "mean_resizing_embeddings noisy_embedding_alpha bos_token unk_token additional_special_tokens",
        "min_sample_len processor_type eot_tokens pretraining_dataset* tokenizer* test_datasets*",
        "shuffle_merged_datasets skip_prepare_dataset remove_unused_columns",
    ),
    **nothing("no effect on the memory of a step").at(
        "trainer_cls device device_map world_size n_gpu n_node max_memory gpu_memory_limit capabilities",
        "env_capabilities compute_capability reinit_* torch_version axolotl_config_path is_*_derived_model",
        "base_model_config cls_model_config type_of_model revision_of_model jagged_restart_* rope_scaling",
        "torchdistx_path modules is_falcon_derived_model is_mistral_derived_model is_qwen_derived_model use_ray",
        "ray_* resources_per_worker fsdp_final_state_dict_type chunked_cross_entropy_num_chunks tiled_mlp_*",
        "flex_attn_compile_kwargs torch_compile_* lr",
    ),
    **{
        name: nothing("logging")
        for name in (
            *("profiler_*", "include_*", "use_mlflow", "hf_mlflow_*", "use_wandb", "use_comet", "comet_*", "gradio_*"),
            *("use_otel_metrics", "otel_metrics_*", "use_trackio", "trackio_*", "bench_*"),
            *("num_generation_samples", "generation_*"),  # part of generate_samples
        )
    },
    "generate_samples": lacking("generation during training"),
    "batch_size": nothing("micro_batch_size and gradient_accumulation_steps set it"),
    "num_labels": nothing("a small classification head"),
    **nothing("loading is not estimated").at(
        "experimental_skip_move_to_device low_cpu_mem_usage auto_resume_from_checkpoints lora_model_dir",
    ),
    **nothing("logging").at("use_swanlab swanlab_* use_tensorboard wandb_* mlflow_*"),
    **nothing("some rows of the embedding").at("resize_token_embeddings_to_32x tokens"),
    "peft_use_dora": lacking("DoRA"),
    "plugins": nothing("their own fields set it"),
    **part("training.variable_lengths").at("sample_packing pad_to_sequence_len"),
    "sample_packing_*": nothing("sequences are counted as full"),
    **nothing("evaluation is not estimated").at("eval_sample_packing val_set_size"),
    "train_on_inputs": nothing("the loss is computed of all tokens"),
    "special_tokens*": nothing("two or three rows of the embedding"),
    **nothing("the model's own file sets it").at("model_type is_llama_derived_model"),
    "evals_per_epoch": nothing("evaluation is not part of a step"),
    "rl": fact("rl", "training.pairs"),
    "rl_*": noted("the second model of preference training"),
}


def _finish(draft: Draft) -> None:
    if draft.facts.get("all_linear"):
        draft.facts["targets"] = "all-linear"
    if isinstance(draft.facts.get("replicas"), int) and draft.facts["replicas"] > 1:
        replicas = draft.facts["replicas"]
        shards = draft.values.get("parallelism.data_parallel", 1)
        if type(shards) is int:  # memcalc's own rules reject a value that is not a number
            draft.values["parallelism.data_parallel"] = shards * replicas
        draft.values["parallelism.data_parallel_replicate"] = replicas
    if draft.values.get("parallelism.context_parallel", 1) not in (None, 1):  # utils/ctx_managers/sequence_parallel.py
        place_rotation(draft)
        draft.limit("the buffers of ring-flash-attn", "PyTorch's ring attention is counted", holds_memory=True)
    _precision(draft)
    draft.default("training.sequence_length", 512)
    place_loading_of_adapters(draft)
    if str(draft.given_fields.get("rl")).lower() in _DPO and draft.values.get("training.finetune") == "qlora":
        place_adapters_in_bf16(draft)
    in_8_bits = draft.facts.get("fp8") is True
    if in_8_bits:
        draft.facts.setdefault("bf16", True)  # Accelerate's autocast for the other modules
    finish_trainer(draft, weights_follow=True, upcast=False)
    place_packed_samples(draft)
    place_trainers_loop(draft)
    # utils/__init__.py, set_pytorch_cuda_alloc_conf, which cli/main.py calls; before torch 2.9 it also sets 16
    # divisions of each power of two.
    place_allocator_settings(draft, EXPANDABLE, "axolotl's command")
    _note_preference(draft)
    place_fp32_modules(draft)
    place_fused_adapters(draft)
    every = draft.facts.get("emptied_caches")  # utils/schemas/config.py, migrate_gc_steps
    if type(every) is int and every > 0:
        draft.default("training.empty_cache_steps", every)
    note_evaluation(draft, asked=_evaluates(draft.given_fields), batch="eval_batch_size")
    _place_fake_quantization(draft)
    if is_on(draft.given_fields.get("use_kernels")):
        _note_kernels(draft)
    if in_8_bits:  # core/trainers/base.py, additional_accelerator_args
        gathers = draft.facts.get("fp8_gather") is True
        float8.multiply_in_8_bits(draft, "tensorwise", gathers=gathers, note=float8.FIRST_LAYER)


def _place_fake_quantization(draft: Draft) -> None:
    """Set fake quantization (utils/quantization.py, prepare_model_for_qat).

    Of its schemes torchao 0.17 rejects NVFP4's (_infer_fake_quantize_configs), which begins with the weights alone.
    """
    facts = draft.facts
    if not {"qat_weights", "qat_inputs"} & facts.keys():
        return
    inputs, weights = (str(facts.get(name)).lower() for name in ("qat_inputs", "qat_weights"))
    whole = draft.values.get("training.finetune", "full") == "full"
    if (inputs, weights) != ("int8", "int4") or not whole or draft.given("training.implementation") != "huggingface":
        why = "axolotl 0.19 with torchao 0.17 does not start with it" if weights == "nvfp4" else ""
        draft.limit(f"quantization-aware training with {weights} weights", why, holds_memory=True)
        return
    if draft.given("training.loss") != "fused":
        draft.limit("quantization-aware training with an LM head that is called", holds_memory=True)
        return
    draft.default("training.fake_quantization", "int8-int4-by-range")
    group = facts.get("qat_group", _QAT_GROUP)
    draft.default("training.fake_quantization_group", _QAT_GROUP if group is None else group)


def _note_kernels(draft: Draft) -> None:
    """Record kernels that `use_kernels` downloads from the hub (transformers 5.16 integrations/hub_kernels.py).

    Of the modules that are trained on CUDA it replaces norms and the loss by Liger's, and linear attention and Mamba by
    fused kernels, which save less; only the experts of gpt-oss become MegaBlocks', which pad each expert's tokens.
    """
    named = str(draft.given_fields.get("base_model")).lower()
    padded = placed_config(draft).get("model_type") == "gpt_oss" or "gpt-oss" in named
    what = "MegaBlocks' experts from the hub" if padded else "kernels from the hub"
    draft.limit(what, "transformers' own modules are counted", holds_memory=padded)


def _note_preference(draft: Draft) -> None:
    """Record the memory of preference training and reinforcement learning beyond the policy (src/axolotl/train.py).

    setup_reference_model loads the model once more, in the same dtype, unless there are adapters or the loss is ORPO's.
    """
    fields = draft.given_fields
    kind = str(fields.get("rl") or "").lower()
    if not kind:
        return
    if kind not in _PREFERENCES:
        raise InputError(
            f"rl = {shown(fields['rl'])} is not a supported value of axolotl.",
            f"Choose from {', '.join(_PREFERENCES)}.",
        )
    if kind in ("grpo", "gdpo", "ebft"):
        draft.limit("reinforcement learning", "completions are generated and scored", holds_memory=True)
        refers = fields.get("trl.beta", 0) not in (0, 0.0)
    elif kind in _DPO:
        _place_pairs(draft)
        refers = is_on(fields.get("rl_adapter_ref_model"))
    else:
        what = f"sequences of {kind.upper()}"
        draft.limit(what, "pairs are twice the micro-batch, and losses need more logits", holds_memory=True)
        refers = kind not in ("orpo", "simpo") and not is_on(fields.get("precompute_ref_log_probs"))
    if refers and (
        draft.values.get("training.finetune", "full") == "full" or is_on(fields.get("rl_adapter_ref_model"))
    ):
        draft.limit(f"the reference model of {kind.upper()}", holds_memory=True, bytes_per_parameter=2)


def _place_pairs(draft: Draft) -> None:
    """Set the fields of TRL's DPOTrainer, which axolotl extends (core/trainers/dpo/trainer.py).

    Both sequences of a pair are in one forward. Its reference is a second copy of the policy, unless adapters are
    disabled to get it, or its log-probabilities are precomputed. trl/trainer/dpo_config.py: disable_dropout.
    """
    draft.default("training.pairs", True)
    draft.default("training.loss", "selective")
    place_logits_of_pairs(draft)
    fields = draft.given_fields
    if is_on(fields.get("dpo_use_weighting")) or "dpo_loss_type" in fields:
        draft.limit("other losses of pairs", "the loss of DPO is counted", holds_memory=True)
    for name in ("dpo_use_liger_kernel", "dpo_padding_free"):
        if is_on(fields.get(name)):
            draft.limit(
                f"{name}: true", "all logits of padded pairs are counted", holds_memory=False, overcounts="activations"
            )
    full = draft.values.get("training.finetune", "full") == "full"
    if full and not is_on(fields.get("precompute_ref_log_probs")):
        draft.default("training.reference_model", True)
    draft.values["training.dropout"] = 0.0
    if not full:
        draft.values["training.lora.dropout"] = 0.0
    place_reentrant_checkpoints(draft, "dpo")
    # core/trainers/dpo/trainer.py, training_step
    draft.values["training.empty_cache_steps"], draft.values["training.empty_cache_when"] = 1, "after-backward"


def _evaluates(fields: Mapping[str, Any]) -> bool:
    """Return whether the run evaluates: without a test set, utils/config/__init__.py skips evaluation steps."""
    return fields.get("val_set_size", 0) not in (0, 0.0) or any(path.startswith("test_datasets") for path in fields)


def _precision(draft: Draft) -> None:
    """Set the precision: bf16 is `auto` by default; bfloat16, float16 and float32 set only the dtype of the weights."""
    facts = draft.facts
    for name in ("bfloat16", "float16", "float32"):
        if facts.get(name) is True:
            facts["weights"] = name
            return
    if "bf16" not in facts and facts.get("fp16") is not True:
        facts["bf16"] = True


def _recognized(data: Mapping[str, Any]) -> bool:
    return "base_model" in data and any(key in data for key in ("datasets", "micro_batch_size", "sequence_len"))


AXOLOTL = FileFormat("axolotl", "0.18", FIELDS, _finish, _recognized, (GPUS,), framework="axolotl")
