"""Fields that TRL's trainers and scripts add to TrainingArguments, and TRL's defaults."""

from __future__ import annotations

from memcalc.frameworks.trl import COMPLETIONS
from memcalc.importers.file_format import Meaning, fact, lacking, noted, nothing, overcounted, to
from memcalc.importers.offload import ACTIVATIONS

_PREFERENCE = fact("preference", "training.framework")

# TRL 1.9, trl/trainer/{sft,dpo,grpo,model}_config.py, trl/scripts/utils.py; and names of 0.24 that differ.
FIELDS: dict[str, Meaning] = {
    "max_seq_length": to("training.sequence_length"),  # until 0.20
    "max_length": to("training.sequence_length"),
    "use_peft": fact("peft", "training.finetune"),
    "load_in_4bit": fact("four_bits", "training.finetune"),
    "load_in_8bit": overcounted("precision", "an 8-bit base"),
    "bnb_4bit_quant_type": to("training.qlora.quantization", {"nf4": "nf4", "fp4": "fp4"}),
    "use_bnb_nested_quant": to("training.qlora.double_quantization"),
    "bnb_4bit_quant_storage": to(
        "training.qlora.quant_storage",
        {"uint8": "uint8", **dict.fromkeys(("bfloat16", "float16", "float32"), "compute"), "": None},
    ),
    "lora_r": to("training.lora.rank"),
    "lora_alpha": to("training.lora.alpha"),
    "lora_dropout": to("training.lora.dropout"),
    "lora_target_modules": fact("targets", "training.lora.target_modules"),
    "lora_modules_to_save": to("training.lora.modules_to_save"),
    "lora_target_parameters": lacking("adapters on stacked experts"),
    **nothing().at("lora_task_type router_aux_loss_coef"),
    "use_rslora": nothing("scaling of adapters"),
    "use_dora": lacking("DoRA"),
    "loss_type": fact("loss_type", "training.loss"),
    "activation_offloading": ACTIVATIONS,
    "model_init_kwargs": lacking("arguments of model loading"),
    "packing": fact("packing", "training.padding_free"),
    "packing_strategy": fact("packing_strategy", "training.padding_free"),
    **nothing("sequences are counted as full").at("padding_free pad_to_multiple_of"),
    **nothing("data").at("truncation_mode shuffle_dataset chat_template* eos_token pad_token system_prompt"),
    **nothing("the loss is computed of all tokens").at("assistant_only_loss completion_only_loss"),
    "ignore_bias_buffers": nothing("implementation of DDP"),
    **nothing("logging").at("callbacks wandb_*"),
    "benchmarks": nothing("evaluation is not estimated"),
    "max_prompt_length": fact("prompt_length", "training.sequence_length"),
    "max_completion_length": fact("completion_length", "training.sequence_length"),
    **dict.fromkeys(
        ("beta", "precompute_ref_*", "sync_ref_model", "ref_model_*", "f_divergence_type", "f_alpha_*", "loss_weights"),
        _PREFERENCE,
    ),
    **nothing("part of preference training").at("ld_alpha use_weighting discopop_tau label_smoothing disable_dropout"),
    "num_generations*": fact("generations", "training.framework"),
    "reward_funcs": fact("reward_funcs", "training.framework"),
    "generation_batch_size": fact("generation_batch", "training.steps_per_generation"),
    "steps_per_generation": fact("generation_steps", "training.steps_per_generation"),
    "num_iterations": fact("iterations", "training.completion_length"),
    **dict.fromkeys(("use_vllm", "vllm_*"), noted("vLLM on the GPUs that train")),
    **nothing("part of reinforcement learning").at(
        "reward_weights scale_rewards temperature top_p top_k min_p repetition_penalty generation_kwargs",
        "cache_implementation epsilon* delta mask_truncated_completions importance_sampling_level",
        "top_entropy_quantile entropy_* use_adaptive_entropy sapo_* vespo_* multi_objective_aggregation",
        "num_completions_to_print max_tool_calling_iterations off_policy_mask_threshold use_bias_correction_kl",
        "code_* ds3_gather_for_generation use_transformers_* transformers_continuous_* parallel_code_*",
    ),
    "cast_lm_head_to_fp32": lacking("a head in fp32"),
    # Of reward models, KTO, PPO and GKD: trl/trainer/{reward,kto}_config.py, trl/experimental/{ppo,gkd}.
    "center_rewards_coefficient": nothing("part of a reward model's loss"),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), _PREFERENCE),
    **dict.fromkeys(("reward_model_path", "sft_model_path"), lacking("reinforcement learning", COMPLETIONS)),
    "teacher_model_*": lacking("a teacher model"),
}
