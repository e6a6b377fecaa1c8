"""axolotl's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.importers import float8
from memcalc.importers.huggingface import ATTENTION, GPUS, RECOMPUTE, TRAINER, finish_trainer
from memcalc.importers.models import named_model
from memcalc.importers.table import Draft, Framework, Meaning, fact, lacking, nothing, to

_FLAG = {True: "flash", False: None}

# axolotl 0.12, src/axolotl/utils/schemas/config.py and its neighbours.
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
    "gradient_checkpointing": to("training.recompute", RECOMPUTE),
    "flash_attention": to("training.attention", _FLAG),
    "sdp_attention": to("training.attention", _FLAG),
    "xformers_attention": to("training.attention", {True: "memory-efficient", False: None}),
    "eager_attention": to("training.attention", {True: "eager", False: None}),
    "attention": to("training.attention", ATTENTION),
    "attn_implementation": to("training.attention", ATTENTION),
    "tensor_parallel_size": to("parallelism.tensor_parallel"),
    "context_parallel_size": to("parallelism.context_parallel"),
    "dp_shard_size": to("parallelism.data_parallel"),
    "dp_replicate_size": fact("replicas", "parallelism.data_parallel_replicate"),
    "fsdp_version": nothing("both versions shard alike; FSDP2's buffers are counted"),
    "load_in_8bit": lacking("a base in 8 bits"),
    "liger_*": lacking("Liger's fused kernels: activations and logits are smaller than estimated"),
    "cut_cross_entropy": lacking("a loss that never holds the logits"),
    "chunked_cross_entropy": lacking("a loss in chunks"),
    "lora_mlp_kernel": lacking("fused kernels of adapters"),
    "lora_qkv_kernel": lacking("fused kernels of adapters"),
    "lora_o_kernel": lacking("fused kernels of adapters"),
    "activation_offloading": lacking("activations that are kept on the host"),
    "torch_compile": lacking("torch.compile"),
    "fp8": float8.FLAG,
    "fp8_enable_fsdp_float8_all_gather": float8.GATHER,
    "qat*": lacking("training that imitates quantization"),
    "unfrozen_parameters": lacking("freezing of layers"),
    "use_kernels": lacking("kernels from the hub"),
    "use_scattermoe": lacking("kernels of experts"),
    "use_sonicmoe": lacking("kernels of experts"),
    "experts_implementation": lacking("kernels of experts"),
    "quantize_moe_experts": lacking("experts in fewer bits"),
    "lora_target_parameters": lacking("adapters beside stacked experts"),
    "gptq": lacking("a base in GPTQ's bits"),
    "expert_parallel_size": lacking("expert parallelism"),
    "trl*": lacking("the loss of preference training or reinforcement learning"),
    "ebft*": lacking("the loss of its own"),
    "flash_attn_*": lacking("fused kernels beside attention"),
    "tiled_mlp": lacking("an MLP in parts of the sequence"),
    "fused_attn_kernel": lacking("fused kernels beside attention"),
    "gemma4_hybrid_attn_impl": lacking("two kinds of attention kernels"),
    "model_quantization_config*": lacking("a base in fewer bits"),
    "bnb_config_kwargs*": lacking("bits of another kind"),
    "dsv4_*": lacking("experts in fewer bits"),
    "llama4_linearized_experts": lacking("kernels of experts"),
    "model_config*": lacking("changes of the model's own config.json"),
    "freeze_*": lacking("freezing of layers"),
    "reward_model": lacking("a reward model"),
    "vllm*": lacking("generation beside the step"),
    "diffusion*": lacking("the loss of diffusion models"),
    "use_onebitllms": lacking("weights of one bit"),
    "batch_size": nothing("micro_batch_size and gradient_accumulation_steps say it"),
    "num_labels": nothing("a head of a few rows"),
    "experimental_skip_move_to_device": nothing("loading is not sized"),
    "low_cpu_mem_usage": nothing("loading is not sized"),
    "hf_use_auth_token": nothing(),
    "auto_resume_from_checkpoints": nothing("loading is not sized"),
    "accelerator_config*": nothing(),
    "min_sample_len": nothing("data"),
    "eta_min": nothing(),
    "use_swanlab": nothing("logging"),
    "swanlab_*": nothing("logging"),
    "use_tensorboard": nothing("logging"),
    "resize_token_embeddings_to_32x": nothing("some rows of the embedding"),
    "processor_type": nothing("data"),
    "eot_tokens": nothing("data"),
    "loss_watchdog_*": nothing(),
    "pretraining_dataset*": nothing("data"),
    "lora_fan_in_fan_out": nothing(),
    "lora_model_dir": nothing("loading is not sized"),
    "peft_use_dora": lacking("DoRA"),
    "plugins": nothing("their own fields say what they do"),
    "sample_packing*": nothing("sequences are counted as full"),
    "eval_sample_packing": nothing("evaluation is not sized"),
    "pad_to_sequence_len": nothing("sequences are counted as full"),
    "train_on_inputs": nothing("the loss is computed of all tokens"),
    "num_epochs": nothing(),
    "val_set_size": nothing("evaluation is not sized"),
    "wandb_*": nothing("logging"),
    "mlflow_*": nothing("logging"),
    "special_tokens*": nothing("two or three rows of the embedding"),
    "tokens": nothing("some rows of the embedding"),
    "tokenizer*": nothing("data"),
    "model_type": nothing("the model's own file says it"),
    "is_llama_derived_model": nothing("the model's own file says it"),
    "strict": nothing(),
    "test_datasets*": nothing("data"),
    "shuffle_merged_datasets": nothing("data"),
    "saves_per_epoch": nothing("saving"),
    "evals_per_epoch": nothing("evaluation is not sized"),
    "early_stopping_patience": nothing(),
    "local_rank": nothing(),
    "debug": nothing(),
    "rl*": lacking("the second model and the loss of preference training"),
    "lr_*": nothing(),
    "cosine_*": nothing(),
    "ddp*": nothing(),
    "skip_prepare_dataset": nothing("data"),
    "remove_unused_columns": nothing("data"),
}


def _finish(draft: Draft) -> None:
    if draft.facts.get("all_linear"):
        draft.facts["targets"] = "all-linear"
    if isinstance(draft.facts.get("replicas"), int) and draft.facts["replicas"] > 1:
        replicas = draft.facts["replicas"]
        draft.values["parallelism.data_parallel"] = draft.values.get("parallelism.data_parallel", 1) * replicas
        draft.values["parallelism.data_parallel_replicate"] = replicas
    in_8_bits = draft.facts.get("fp8") is True
    if in_8_bits:
        draft.facts.setdefault("bf16", True)  # Accelerate's autocast for what stays
    finish_trainer(draft, weights_follow=True, upcast=False)
    if in_8_bits:  # core/trainers/base.py, additional_accelerator_args
        gathers = draft.facts.get("fp8_gather") is True
        float8.multiply_in_8_bits(draft, "tensorwise", gathers=gathers, note=float8.FIRST_LAYER)


def _recognised(data: Mapping[str, Any]) -> bool:
    return "base_model" in data and any(key in data for key in ("datasets", "micro_batch_size", "sequence_len"))


AXOLOTL = Framework("axolotl", "0.12", FIELDS, _finish, _recognised, GPUS)
