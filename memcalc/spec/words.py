"""Other programs' names of fields: Hugging Face configs, TrainingArguments, TRL, PEFT and launchers.

A name is listed if it has one meaning in a training step in all programs; `batch_size` is the micro-batch. Names with
several meanings, or no effect on memory, are rejected with a suggestion (`advice_for`).
Sources: transformers 5.23 (configuration_*.py, training_args.py), TRL 1.9, PEFT 0.21, Megatron-LM, torchtitan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.errors import InputError
from memcalc.spec.yaml_source import Path

# Inputs that no block keeps: the total number of GPUs, from which data_parallel follows (`defaults.split_gpus`), and
# the memory budget of a GPU, which becomes part of its name (`cards.with_budget`).
GPUS: Path = ("parallelism", "gpus")
BUDGET: Path = ("hardware", "budget")

# Other names of one field with the same value.
_NAMES: dict[str, tuple[str, ...]] = {
    "preset": ("model", "model_name_or_path", "model_name", "base_model", "model_id", "pretrained_model_name_or_path"),
    "model.architecture": ("model_type",),
    "model.num_layers": ("num_hidden_layers", "n_layers", "n_layer", "layers"),
    "model.hidden_size": ("n_embd", "d_model", "embed_dim", "model_dim"),
    "model.num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "model.num_key_value_heads": ("num_kv_heads", "n_kv_heads", "num_query_groups"),
    "model.intermediate_size": ("ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"),
    "model.max_position_embeddings": ("n_positions", "n_ctx"),
    "model.vocab_size": ("padded_vocab_size", "n_vocab"),
    "model.tie_word_embeddings": ("tie_embeddings", "tied_embeddings"),
    "model.moe.num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "model.moe.num_experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k"),
    "model.moe.expert_intermediate_size": ("moe_intermediate_size",),
    "training.micro_batch_size": (
        *("per_device_train_batch_size", "per_gpu_train_batch_size", "train_micro_batch_size_per_gpu"),
        *("batch_size", "batch", "bs", "mbs", "batch_size_per_gpu", "per_device_batch_size", "local_batch_size"),
    ),
    "training.sequence_length": (
        *("seq", "seq_len", "seq_length", "seqlen", "sequence_len", "max_seq_len", "max_seq_length", "max_length"),
        *("model_max_length", "block_size", "cutoff_len", "context_length", "ctx_len"),
    ),
    "training.gradient_accumulation_steps": (
        *("gradient_accumulation", "grad_accum", "grad_accum_steps", "accumulation_steps", "accumulate_grad_batches"),
        "ga",
    ),
    "training.global_batch_size": ("gbs", "effective_batch_size", "total_batch_size"),
    "training.gradient_clipping": ("max_grad_norm", "clip_grad", "max_norm", "grad_clip"),
    "training.alloc_conf": ("pytorch_cuda_alloc_conf", "PYTORCH_CUDA_ALLOC_CONF", "pytorch_alloc_conf"),
    "training.lora.rank": ("lora_r", "lora_rank", "r"),
    "training.lora.alpha": ("lora_alpha",),
    "training.lora.dropout": ("lora_dropout",),
    "training.lora.target_modules": ("target_modules", "lora_target_modules", "lora_target"),
    "training.lora.modules_to_save": ("modules_to_save",),
    "training.qlora.quantization": ("bnb_4bit_quant_type",),
    "training.qlora.compute_dtype": ("bnb_4bit_compute_dtype",),
    "training.qlora.double_quantization": ("bnb_4bit_use_double_quant", "use_bnb_nested_quant", "double_quant"),
    "training.compile": ("torch_compile",),
    "training.finetune": ("finetuning_type", "adapter", "finetuning"),
    "training.optimizer_options.weight_decay": ("weight_decay",),
    "parallelism.gpus": ("gpus", "num_gpus", "n_gpus", "ngpus", "world_size", "nproc_per_node", "num_processes"),
    "parallelism.data_parallel": ("dp", "dp_size", "data_parallel_size"),
    "parallelism.tensor_parallel": ("tp", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size"),
    "parallelism.pipeline_parallel": ("pp", "pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    "parallelism.context_parallel": ("cp", "cp_size", "context_parallel_size"),
    "parallelism.expert_parallel": ("ep", "ep_size", "expert_parallel_size", "expert_model_parallel_size"),
    "parallelism.zero_stage": ("zero", "stage", "zero_optimization_stage", "deepspeed_stage", "deepspeed_zero_stage"),
    "hardware.budget": ("budget", "memory_limit", "max_memory", "gpu_memory", "vram"),
    "hardware.gpu": ("card", "gpu_type", "gpu_name", "gpu_model", "accelerator"),
}

_RECOMPUTE = {True: {"training.recompute": "full"}, False: {"training.recompute": "none"}}
_FLASH = {"training.attention": "flash", "training.attention_windows": "kernel"}
_DTYPES = {
    word: {"training.dtype": ours}
    for ours, words in {
        "bf16": ("bfloat16", "bf16", "torch.bfloat16"),
        "fp16": ("float16", "fp16", "torch.float16", "half"),
        "fp32": ("float32", "fp32", "torch.float32"),
    }.items()
    for word in words
}
_PRECISIONS = {  # precision strings of Lightning, pytorch_lightning/plugins/precision
    **_DTYPES,
    "bf16-mixed": {"training.dtype": "bf16", "training.recipe": "amp"},
    "16-mixed": {"training.dtype": "fp16", "training.recipe": "amp"},
    "bf16-true": {"training.dtype": "bf16", "training.recipe": "pure"},
    "16-true": {"training.dtype": "fp16", "training.recipe": "pure"},
    "32-true": {"training.dtype": "fp32"},
}
_OPTIMIZERS: dict[Any, dict[str, Any]] = {
    "adamw_torch": {"training.optimizer": "adamw", "training.optimizer_implementation": "foreach"},
    "adamw_torch_fused": {"training.optimizer": "adamw", "training.optimizer_implementation": "fused"},
    "adamw_bnb_8bit": {"training.optimizer": "adam-8bit"},
    "adamw_8bit": {"training.optimizer": "adam-8bit"},
    "adamw_torch_8bit": {"training.optimizer": "adam-8bit"},
    "paged_adamw_8bit": {"training.optimizer": "adam-8bit", "training.optimizer_options.paged": True},
    "paged_adamw_32bit": {"training.optimizer": "adamw", "training.optimizer_options.paged": True},
    "paged_adamw": {"training.optimizer": "adamw", "training.optimizer_options.paged": True},
    "adafactor": {"training.optimizer": "adafactor-hf"},
    "lion_32bit": {"training.optimizer": "lion"},
    "lion_8bit": {"training.optimizer": "lion-8bit"},
    "paged_lion_8bit": {"training.optimizer": "lion-8bit", "training.optimizer_options.paged": True},
}
_ATTENTIONS = {
    **dict.fromkeys(("flash_attention_2", "flash_attention_3", "fa2", "fa3", "flash"), _FLASH),
    "sdpa": {"training.attention": "sdpa"},
    "eager": {"training.attention": "eager"},
    "xformers": {"training.attention": "memory-efficient", "training.attention_windows": "kernel"},
}
_OFFLOADS = {
    **{word: {"parallelism.offload": "optimizer"} for word in (True, "cpu", "nvme")},
    **{word: {"parallelism.offload": "none"} for word in (False, "none")},
}
_OFFLOAD_ALL = {True: {"parallelism.offload": "all"}, False: {"parallelism.offload": "none"}}
_SHARDED = {"parallelism.zero_stage": 3, "parallelism.engine": "fsdp2"}

# Names with values that differ from memcalc's: the fields that each value sets.
_VALUES: dict[str, Mapping[Any, Mapping[str, Any]]] = {
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing", "use_gradient_checkpointing"), _RECOMPUTE),
    "bf16": {True: {"training.dtype": "bf16"}},
    "fp16": {True: {"training.dtype": "fp16"}},
    "torch_dtype": _DTYPES,
    "precision": _PRECISIONS,
    "optim": _OPTIMIZERS,
    **dict.fromkeys(("attn_implementation", "attention_implementation"), _ATTENTIONS),
    "load_in_4bit": {True: {"training.finetune": "qlora"}},
    "use_peft": {True: {"training.finetune": "lora"}, False: {"training.finetune": "full"}},
    "use_liger_kernel": {
        True: {"training.kernels": "liger", "training.loss": "fused", "training.implementation": "huggingface"},
        False: {"training.kernels": "torch"},
    },
    "offload_optimizer": _OFFLOADS,
    **dict.fromkeys(("cpu_offload", "fsdp_offload_params"), _OFFLOAD_ALL),
    "fsdp": {
        True: _SHARDED,
        "full_shard": _SHARDED,
        "full_shard auto_wrap": _SHARDED,
        "shard_grad_op": {"parallelism.zero_stage": 2, "parallelism.engine": "fsdp2"},
        False: {"parallelism.zero_stage": 0},
    },
}

_NO_EFFECT = """
    learning_rate lr min_lr lr_scheduler_type lr_scheduler scheduler warmup_steps warmup_ratio warmup epochs
    num_train_epochs num_epochs max_steps train_steps seed data_seed adam_beta1 adam_beta2 adam_epsilon betas eps
    logging_steps save_steps save_strategy eval_steps output_dir report_to run_name dataset dataset_name
    tokenizer tokenizer_name num_workers dataloader_num_workers rope_theta rms_norm_eps layer_norm_eps initializer_range
    bos_token_id eos_token_id pad_token_id use_cache transformers_version lora_bias temperature top_p
""".split()

# Names that do not determine one field, with a suggestion.
_ADVICE = {
    "train_batch_size": "Set global_batch_size (DeepSpeed's train_batch_size), or micro_batch_size for one GPU.",
    **dict.fromkeys(("max_new_tokens", "prompt_length"), "Set inference.new_tokens and inference.prompt_length."),
    "deepspeed": "Name the DeepSpeed file as CONFIG, or set zero_stage.",
    "fsdp_config": "Name the file of TrainingArguments as CONFIG, or set zero_stage: 3.",
    "mixed_precision": "Set dtype (bf16, fp16) and recipe: amp for autocast with fp32 weights, pure for bf16 weights.",
    "amp": "Set recipe: amp.",
    "hidden_act": "Set mlp: gelu, relu, relu2, swiglu (silu with a gate) or geglu.",
    "activation_function": "Set mlp: gelu, relu, relu2, swiglu (silu with a gate) or geglu.",
    "attention_bias": "Set qkv_bias and output_bias.",
    "load_in_8bit": "An 8-bit base is not modelled; for a 4-bit base set finetune: qlora.",
    "quantization": "Set finetune: qlora for a 4-bit base, or inference.quantization for generation.",
    "flash_attention": "Set attention: flash, memory-efficient or eager.",
    "use_flash_attention_2": "Set attention: flash, memory-efficient or eager.",
    "num_nodes": "Set data_parallel, tensor_parallel and pipeline_parallel; --gpus N sets the number of all GPUs.",
    "nodes": "Set data_parallel, tensor_parallel and pipeline_parallel; --gpus N sets the number of all GPUs.",
    "sharding": "Set zero_stage (3 shards parameters, gradients and optimizer state) and engine: fsdp2 or deepspeed.",
    "offload_params": "Set offload: parameters (ZeRO-Infinity) or all (FSDP2's CPUOffloadPolicy).",
    "offload_param": "Set offload: parameters (ZeRO-Infinity) or all (FSDP2's CPUOffloadPolicy).",
    "qlora": "Set finetune: qlora, or write a block qlora: {...}.",
    "explain": "Use the option --explain [COMPONENT].",
}

_HOME = {name: field for field, names in _NAMES.items() for name in names}


def foreign_names() -> list[str]:
    """Return all names that other programs have for memcalc's fields."""
    return [*_HOME, *_VALUES]


def is_foreign_name(name: str, block: str | None = None) -> bool:
    """Return whether `name` is another program's name of a field, in this block if one is given."""
    fields = _fields_of(name)
    return bool(fields) and (block is None or all(field.partition(".")[0] == block for field in fields))


def translated(name: str, value: Any, where: str) -> dict[Path, Any]:
    """Return the fields that another program's name and value set: values by the path of the field.

    Args:
        name: a name for which `is_word` holds.
        value: as YAML reads it; None unsets the field.
        where: the place of the name, for messages.

    Raises:
        InputError: the value is invalid for the name.
    """
    if name in _HOME:
        return {tuple(_HOME[name].split(".")): value}
    table = _VALUES[name]
    if value is None:
        return dict.fromkeys((tuple(field.split(".")) for field in _fields_of(name)), None)
    if isinstance(value, str):
        value = value.lower()
        value = {"true": True, "false": False}.get(value, value)
    if isinstance(value, bool | str | int) and (value in table) and isinstance(value, bool) == (value in (True, False)):
        return {tuple(field.split(".")): ours for field, ours in table[value].items()}
    if value is False:  # bf16: false, load_in_4bit: false
        return {}
    if name == "optim" and isinstance(value, str):  # one of memcalc's, or validation lists the valid values
        return {("training", "optimizer"): value.replace("_", "-")}
    known = ", ".join(str(each).lower() if isinstance(each, bool) else str(each) for each in table)
    raise InputError(f"{name} = {str(value)[:60]!r} is not a known value.", f"Choose from {known}.", where)


def field_of(name: str) -> str | None:
    """Return the dotted path of the first field that another program's name sets; None: it is not such a name."""
    fields = _fields_of(name)
    return fields[0] if fields else None


def advice_for(name: str) -> str | None:
    """Return a suggestion for a name that determines no field; None: there is none."""
    bare = name.rpartition(".")[2]
    if bare in _NO_EFFECT:
        return f"Leave {bare} out: the field has no effect on memory."
    return _ADVICE.get(bare)


def _fields_of(name: str) -> tuple[str, ...]:
    if name in _HOME:
        return (_HOME[name],)
    return tuple(dict.fromkeys(field for fields in _VALUES.get(name, {}).values() for field in fields))
