"""What each excerpt comes to: its file's name, its text, what is set beside it, and our fields."""

from typing import Any

from tests.importers.excerpts import (
    ACCELERATE,
    AXOLOTL,
    DEEPSPEED,
    GPT_NEOX,
    LITGPT,
    LLAMA_FACTORY,
    MEGATRON,
    NEMO,
    NEMO_RECIPE,
    QLORA,
    TORCHTITAN,
    TORCHTUNE,
    TORCHTUNE_FULL,
    TRAINER,
    ZERO_3,
)

CASES: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "axolotl": (
        "run.yaml",
        AXOLOTL,
        ("data_parallel=8",),
        {
            "training.micro_batch_size": 2,
            "training.sequence_length": 4096,
            "training.gradient_accumulation_steps": 4,
            "training.optimizer": "adamw",
            "training.optimizer_implementation": "fused",
            "training.recompute": "full",
            "training.attention": "flash",
            "training.dtype": "bf16",
            "training.recipe": "amp",  # fp32 shards, gathered in bf16, under FSDP1's autocast
            "parallelism.fsdp.param_dtype": "bf16",
            "training.implementation": "huggingface",
            "parallelism.zero_stage": 3,
            "parallelism.engine": "fsdp2",
            "parallelism.data_parallel": 8,
            "model.hidden_size": 4096,
        },
    ),
    "axolotl QLoRA": (
        "run.yml",
        QLORA,
        (),
        {
            "training.finetune": "qlora",
            "training.lora.rank": 16,
            "training.lora.target_modules": "all-linear",
            "training.optimizer": "adam-8bit",
            "training.recipe": "amp",  # the Trainer's autocast, over a base in 16 and 4 bits
            "training.lora.base_dtype": "compute",
            "training.lora.adapter_dtype": "fp32",
            "model.hidden_size": 8192,
        },
    ),
    "LLaMA-Factory": (
        "run.yaml",
        LLAMA_FACTORY,
        (),
        {
            "training.finetune": "lora",
            "training.lora.rank": 8,
            "training.lora.target_modules": ("q_proj", "v_proj"),
            "training.recompute": "full",  # its own default
            "training.gradient_accumulation_steps": 8,
            "training.sequence_length": 2048,
        },
    ),
    "LLaMA-Factory with ZeRO 3": (
        "run.yaml",
        ZERO_3,
        ("data_parallel=8",),
        {"parallelism.zero_stage": 3, "parallelism.engine": "deepspeed", "training.recipe": "mixed-16"},
    ),
    "Hugging Face TrainingArguments": (
        "run.yaml",
        TRAINER,
        (),
        {
            "training.micro_batch_size": 16,
            "training.recipe": "pure",  # weights are loaded in 16 bits and stay so
            "training.finetune": "full",  # lora_r alone makes no adapter
            "training.attention": "flash",
            "model.num_layers": 32,
        },
    ),
    "LitGPT": (
        "run.yaml",
        LITGPT,
        (),
        {
            "training.finetune": "qlora",
            "training.qlora.double_quantization": True,
            "training.qlora.quantize_lm_head": True,
            "training.optimizer_options.paged": True,
            "training.lora.rank": 32,
            "training.lora.adapter_dtype": "compute",
            "training.lora.target_modules": ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
            "training.gradient_accumulation_steps": 8,
            "training.sequence_length": 512,
        },
    ),
    "torchtitan": (
        "run.toml",
        TORCHTITAN,
        (),
        {
            "parallelism.data_parallel": 64,  # 2 groups of 32
            "parallelism.data_parallel_replicate": 2,
            "parallelism.zero_stage": 3,
            "training.sequence_length": 8192,
            "training.recompute": "every-2",
            "training.optimizer_implementation": "fused",
            "model.vocab_size": 128256,
        },
    ),
    "torchtune": (
        "8B_lora.yaml",
        TORCHTUNE,
        (),
        {
            "model.hidden_size": 4096,
            "model.max_position_embeddings": 8192,  # of llama-3-8b, which has the sizes of 3.1
            "training.finetune": "lora",
            "training.lora.rank": 8,
            "training.lora.target_modules": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            "training.lora.adapter_dtype": "compute",
            "training.optimizer": "adam-8bit",
            "training.recompute": "full",
            "training.recipe": "pure",
            "training.gradient_accumulation_steps": 8,
            "training.sequence_length": 4096,
        },
    ),
    "torchtune full": (
        "7B_full.yaml",
        TORCHTUNE_FULL,
        ("data_parallel=8",),
        {
            "model.hidden_size": 3584,
            "training.finetune": "full",
            "training.optimizer_implementation": "fused",
            "training.recompute": "none",
            "parallelism.zero_stage": 3,  # as its distributed recipes shard
            "parallelism.engine": "fsdp2",
        },
    ),
    "torchtitan by operator": (
        "8B.toml",
        TORCHTITAN.replace('selective_ac_option = "2"', 'selective_ac_option = "op"'),
        (),
        {
            "training.implementation": "torchtitan",
            "training.recompute": "selective",
            "training.recipe": "amp",  # fp32 shards, gathered in 16 bits
        },
    ),
    "torchtitan with tensor parallelism": (
        "8B.toml",
        TORCHTITAN.replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 2"),
        (),
        {
            "training.implementation": "torchtitan",
            "training.recipe": "amp",
            "parallelism.fsdp.param_dtype": "bf16",
            "parallelism.fsdp.reduce_dtype": "fp32",
            "parallelism.fsdp.wrap": "layers-and-ends",
            "parallelism.tensor_parallel": 2,
            "parallelism.sequence_parallel": True,
        },
    ),
    "Megatron-LM": (
        "pretrain.sh",
        MEGATRON,
        (),
        {
            "model.num_layers": 96,
            "model.tie_word_embeddings": True,
            "model.qkv_bias": True,
            "training.dtype": "fp16",
            "training.gradient_dtype": "fp16",  # fp32 is the default beside bf16 alone
            "training.dropout": 0.0,
            "training.recipe": "mixed-18",
            "training.recompute": "selective",
            "training.gradient_accumulation_steps": 768,  # 1536 sequences over 8 * 16 / (8 * 8) = 2 replicas
            "parallelism.data_parallel": 2,
            "parallelism.tensor_parallel": 8,
            "parallelism.pipeline_parallel": 8,
            "parallelism.sequence_parallel": True,
            "parallelism.zero_stage": 1,
            "parallelism.engine": "megatron",
        },
    ),
    "NeMo": (
        "megatron_gpt_config.yaml",
        NEMO,
        ("vocab_size=50304",),
        {
            "model.max_position_embeddings": 512,  # a reference to another field
            "model.mlp": "swiglu",
            "model.mlp_bias": False,
            "parallelism.data_parallel": 4,  # 8 * 2 / 4
            "parallelism.zero_stage": 1,
            "training.gradient_accumulation_steps": 8,  # 128 / (4 * 4)
        },
    ),
    "NeMo 2": (
        "recipe.yaml",
        NEMO_RECIPE,
        (),
        {
            "model.num_layers": 16,  # the file's, over its class's 32
            "model.intermediate_size": 14336,
            "model.num_key_value_heads": 8,
            "model.mlp": "swiglu",
            "model.tie_word_embeddings": False,
            "model.vocab_size": 128512,  # 128,256 to 128 for each of 4 ranks
            "model.max_position_embeddings": 8192,
            "training.sequence_length": 8192,
            "training.micro_batch_size": 1,
            "training.gradient_accumulation_steps": 64,  # 128 over 8 * 2 / (4 * 2) = 2 replicas
            "training.recipe": "mixed-18",
            "training.gradient_dtype": "bf16",  # the plugin's, over DDP's
            "training.fp8": "tensorwise",
            "training.fp8_params": True,
            "training.recompute": "full",
            "training.dropout": 0.0,
            "parallelism.data_parallel": 2,
            "parallelism.tensor_parallel": 4,
            "parallelism.context_parallel": 2,
            "parallelism.sequence_parallel": True,
            "parallelism.zero_stage": 1,
        },
    ),
    "DeepSpeed": (
        "ds_config.json",
        DEEPSPEED,
        ("preset=llama-3-8b", "data_parallel=8"),
        {
            "parallelism.zero_stage": 2,
            "parallelism.engine": "deepspeed",
            "parallelism.offload": "optimizer",
            "training.micro_batch_size": 4,
            "training.recipe": "mixed-16",
            "training.optimizer": "adamw",
        },
    ),
    "Accelerate": (
        "fsdp.yaml",
        ACCELERATE,
        ("preset=llama-3-8b", "b=2"),
        {
            "parallelism.zero_stage": 3,
            "parallelism.engine": "fsdp2",
            "parallelism.data_parallel": 8,
            "training.recompute": "full",
            "training.micro_batch_size": 2,
        },
    ),
    "GPT-NeoX": (
        "20B.yml",
        GPT_NEOX,
        ("vocab_size=50432",),
        {
            "model.num_layers": 44,
            "model.intermediate_size": 4 * 6144,
            "model.parallel_block": True,
            "model.rotary_dim": 6144 // 64 // 4,
            "model.tie_word_embeddings": False,
            "model.mlp_bias": True,
            "training.dtype": "fp16",
            "training.recipe": "mixed-16",
            "training.optimizer": "adam",
            "training.attention": "eager",
            "training.recompute": "full",
            "training.micro_batch_size": 4,
            "training.gradient_accumulation_steps": 32,
            "parallelism.data_parallel": 96 // (4 * 2),
            "parallelism.tensor_parallel": 2,
            "parallelism.pipeline_parallel": 4,
            "parallelism.zero_stage": 1,
            "parallelism.engine": "deepspeed",
        },
    ),
}
