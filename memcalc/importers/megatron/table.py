"""Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.frameworks.draft import Draft
from memcalc.importers.file_format import (
    REPLICAS,
    FileFormat,
    Meaning,
    fact,
    lacking,
    nothing,
    overcounted,
    part,
    place_dropout,
    to,
)
from memcalc.importers.megatron.deepspeed import CONFIG, CONFIG_FIELDS, place_deepspeed, runs_deepspeed
from memcalc.importers.megatron.parts import (
    place_attention,
    place_experts,
    place_precision,
    place_ranks,
    place_recompute,
    place_rows,
    place_widths,
)

_BF16 = {True: "bf16", False: None}
_NORMS = {"layernorm": "layernorm", "rmsnorm": "rmsnorm", "layernorm1p": "layernorm"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none", "yarn": "rope", "mrope": "rope"}
_POSITIONS |= {"absolute": "learned", "rotary": "rope", "alibi": "alibi"}  # of BigScience's Megatron-DeepSpeed


# arguments.py: the defaults of latent attention; 0: queries are projected directly.
_LATENT = {
    "q-lora-rank": ("q_lora_rank", 0),
    "kv-lora-rank": ("kv_lora_rank", 32),
    "qk-head-dim": ("qk_nope_head_dim", 128),
    "qk-pos-emb-head-dim": ("qk_rope_head_dim", 64),
    "v-head-dim": ("v_head_dim", 128),
}

_STATES = ("main-grads", "main-params", "exp-avg", "exp-avg-sq")  # of the precision-aware optimizer

# Megatron-Core 0.14, megatron/training/arguments.py.
FIELDS: dict[str, Meaning] = {
    "num-layers": to("model.num_layers"),
    "hidden-size": to("model.hidden_size"),
    "ffn-hidden-size": to("model.intermediate_size"),
    "num-attention-heads": to("model.num_attention_heads"),
    "num-query-groups": fact("groups", "model.num_key_value_heads"),
    "group-query-attention": fact("grouped", "model.num_key_value_heads"),
    "kv-channels": to("model.head_dim"),
    "max-position-embeddings": to("model.max_position_embeddings"),
    "vocab-size": fact("vocabulary", "model.vocab_size"),
    "padded-vocab-size": to("model.vocab_size"),
    "pad-vocab-size-to": to("model.vocab_size"),  # of BigScience's Megatron-DeepSpeed
    "make-vocab-size-divisible-by": fact("divisible", "model.vocab_size"),
    "tokenizer-type": fact("tokenizer_type", "rows of the vocabulary"),
    "tokenizer-model": fact("tokenizer_model", "rows of the vocabulary"),
    "position-embedding-type": to("model.position_embedding", _POSITIONS),
    "use-rotary-position-embeddings": to("model.position_embedding", {True: "rope"}),
    "normalization": to("model.normalization", _NORMS),
    "swiglu": to("model.mlp", {True: "swiglu"}),
    "squared-relu": to("model.mlp", {True: "relu"}),
    "disable-bias-linear": fact("no_bias", "model.qkv_bias, model.output_bias, model.mlp_bias"),
    "add-qkv-bias": to("model.qkv_bias"),
    "untie-embeddings-and-output-weights": fact("untied", "model.tie_word_embeddings"),
    "qk-layernorm": to("model.qk_norm"),
    "num-experts": to("model.moe.num_experts"),
    "moe-router-topk": to("model.moe.num_experts_per_token"),
    "moe-ffn-hidden-size": to("model.moe.expert_intermediate_size"),
    "moe-shared-expert-intermediate-size": to("model.moe.shared_expert_intermediate_size"),
    "multi-latent-attention": fact("latent", "model.mla"),
    **{name: fact(name, f"model.mla.{ours}") for name, (ours, _) in _LATENT.items()},
    "mtp-num-layers": lacking("multi-token prediction"),
    "seq-length": to("training.sequence_length"),
    "encoder-seq-length": to("training.sequence_length"),
    "micro-batch-size": to("training.micro_batch_size"),
    "global-batch-size": fact("global", "training.global_batch_size"),
    "bf16": to("training.dtype", _BF16),
    "fp16": to("training.dtype", {True: "fp16", False: None}),
    "attention-dropout": fact("attention_dropout", "training.dropout"),
    "hidden-dropout": fact("hidden_dropout", "training.dropout"),
    "optimizer": to("training.optimizer", {"adam": "adamw", "sgd": "momentum"}),  # its Adam has decoupled weight decay
    "use-distributed-optimizer": to("parallelism.zero_stage", {True: 1}),
    "use-precision-aware-optimizer": overcounted("states", "low-precision moments and gradients"),
    "use-megatron-fsdp": lacking("Megatron's FSDP", overcounts="all"),
    "use-custom-fsdp": lacking("Megatron's FSDP", overcounts="all"),
    "use-torch-fsdp2": lacking("FSDP2 under Megatron", overcounts="all"),
    "optimizer-cpu-offload": overcounted("states", "optimizer states in host memory"),
    "checkpoint-activations": to("training.recompute", {True: "full"}),  # until 2022
    "activations-checkpoint-method": fact("method", "training.recompute"),
    "activations-checkpoint-num-layers": fact("recomputed", "training.recompute"),
    "recompute-granularity": to("training.recompute", {"selective": "selective", "full": "full"}),
    "recompute-activations": to("training.recompute", {True: "selective"}),
    "recompute-modules": fact("modules", "training.recompute_modules"),
    "recompute-method": fact("method", "training.recompute"),
    "recompute-num-layers": fact("recomputed", "training.recompute"),
    "distribute-saved-activations": overcounted("activations", "checkpoints that are split over tensor-parallel ranks"),
    "cpu-offloading*": overcounted("activations", "offload activations"),
    "tensor-model-parallel-size": to("parallelism.tensor_parallel"),
    "pipeline-model-parallel-size": to("parallelism.pipeline_parallel"),
    "context-parallel-size": to("parallelism.context_parallel"),
    "cp-comm-type": fact("context_method", "parallelism.context_parallel_method"),
    "expert-model-parallel-size": to("parallelism.expert_parallel"),
    "expert-tensor-parallel-size": to("parallelism.expert_tensor_parallel"),
    "sequence-parallel": to("parallelism.sequence_parallel"),
    "num-layers-per-virtual-pipeline-stage": fact("chunk", "parallelism.virtual_stages"),
    "nproc-per-node": fact("per_node", "parallelism.data_parallel"),
    "nnodes": fact("nodes", "parallelism.data_parallel"),
    "rampup-batch-size": nothing("the full batch is counted"),
    "attention-backend": fact("attention", "training.attention"),
    "use-flash-attn": nothing("its attention is one fused kernel"),
    "transformer-impl": fact("transformer_impl", "training.attention"),
    "use-mcore-models": nothing("Megatron-Core is counted"),
    "fp8-format": fact("fp8", "training.fp8"),
    "fp8-recipe": fact("fp8_recipe", "training.fp8"),
    "fp8-param-gather": to("training.fp8_params"),
    "fp8*": nothing("changes how scales are computed, not what is saved"),
    "fp4*": lacking("FP4 matmuls"),
    "use-nccl-ub": lacking("registered NCCL buffers"),
    "fsdp-double-buffer": lacking("Megatron's FSDP", overcounts="all"),
    "softmax-type": lacking("attention sinks", known=("vanilla",)),
    "activation-func-clamp-value": lacking("clamped activations"),
    "fine-grained-activation-offloading": overcounted("activations", "offload activations"),
    "use-bnb-optimizer": overcounted("states", "optimizers of bitsandbytes"),
    "audio-*": lacking("an audio encoder"),
    **dict.fromkeys(("hybrid-*", "mamba-*", "is-hybrid-model"), lacking("Mamba's layers")),
    "recompute-vision*": nothing("part of a vision encoder"),
    **dict.fromkeys(("enable-cuda-graph", "external-cuda-graph", "cuda-graph-impl"), lacking("CUDA graphs")),
    "cuda-graph-*": nothing("part of CUDA graphs"),
    "cross-entropy-loss-fusion": fact("fuses_loss", "training.loss"),
    "cross-entropy-fusion-impl": fact("fusion", "training.loss"),
    "overlap-*": nothing("changes when memory is allocated, not how much"),
    # Of Megatron-DeepSpeed.
    "deepspeed": fact("deepspeed", "parallelism.engine"),
    "program": fact("program", "parallelism.pipeline_tensors"),
    "zero-stage": fact("zero_stage", "parallelism.zero_stage"),
    "pp-partition-method": fact("split", "parallelism.pipeline_split"),
    "no-pipeline-parallel": fact("unpipelined", "parallelism.pipeline_tensors"),
    "embed-layernorm": fact("embedding_norm", "model.embedding_norm"),
    "glu-activation": fact("gate", "model.mlp"),
    "checkpoint-num-layers": fact("together", "training.recompute"),
    "partition-activations": overcounted("activations", "checkpoints that are split over tensor-parallel ranks"),
    "checkpoint-in-cpu": overcounted("activations", "checkpoints offloaded to the CPU"),
    "deepspeed-activation-checkpointing": nothing("DeepSpeed's function saves what Megatron-LM's does"),
    "deepspeed-mpi": nothing("no effect on memory"),
    "mup*": nothing("initialization and learning rates"),
    "bitfit": overcounted("states", "frozen layers"),
    CONFIG: part("DeepSpeed's configuration"),
    f"{CONFIG}.curriculum_learning*": nothing("shorter sequences at the beginning"),
    **CONFIG_FIELDS,
    **dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), to("training.alloc_conf")),
    "loss-scale": nothing("loss scaling"),
    "empty-unused-memory-level": nothing("cached blocks are part of reserved memory"),
    "decoupled-*": nothing("no effect on memory"),
    **{
        name: nothing("no effect on memory")
        for name in (
            *("tee", "max-restarts", "abort-on-*", "kill-switch-path", "norm-target-loss", "reset-progress"),
            *("sync-tp-duplicated-parameters", "universal-checkpoint", "loss-on-targets-only"),
            *("valid-weighted-*", "model-provider", "dataset-provider"),
        )
    },
    "tiktoken-*": nothing("data"),
    "tp-comm-overlap*": nothing("changes when memory is allocated, not how much"),
    "apply-query-key-layer-scaling": nothing("scaling of attention scores"),
    "optimizer-offload-fraction": nothing("part of optimizer-cpu-offload"),
    "grad-reduce-in-bf16": fact("reduce_bf16", "training.gradient_dtype"),
    "accumulate-allreduce-grads-in-fp32": fact("accumulates_in_fp32", "training.gradient_dtype"),
    **{
        f"{name}-dtype": overcounted("states", "low-precision moments, master weights and gradients")
        for name in _STATES
    },
    "no-position-embedding": fact("no_positions", "model.position_embedding"),
    **{
        f"no-{name}": nothing("changes fusion and overlap, not what is saved")
        for name in (
            *("masked-softmax-fusion", "bias-gelu-fusion", "bias-swiglu-fusion", "bias-dropout-fusion", "rope-fusion"),
            *("gradient-accumulation-fusion", "gradient-reduce-div-fusion", "persist-layer-norm", "load-*", "save-*"),
            *("async-tensor-model-parallel-allreduce", "overlap-p2p-communication", "check-for-nan*", "align-*"),
            *("create-attention-mask-in-dataloader", "mmap-bin-files", "one-logger", "data-sharding", "log-*"),
            *("contiguous-buffers-in-local-ddp", "scatter-gather-tensors-in-pipeline", "query-key-layer-scaling"),
            *("initialization", "pin-cpu-*", "rope-freq", "weight-decay-cond-type", "yarn-*", "barrier-*"),
            *("use-layer-wise-param-layout", "new-tensors", "fp8-weight-transpose-cache"),
        )
    },
    "moe-layer-freq": fact("expert_layers", "model.moe.dense_layers"),
    "moe-shared-expert-gate": to("model.moe.shared_expert_gate"),
    "moe-token-dispatcher-type": fact("dispatcher", "training.implementation"),
    "moe-layer-recompute": overcounted("activations", "recomputation of experts only"),
    "moe-expert-capacity-factor": overcounted(
        "activations", "an expert capacity factor", "balanced routing is counted"
    ),
    "moe-pad-expert-input-to-capacity": overcounted(
        "activations", "an expert capacity factor", "balanced routing is counted"
    ),
    "moe-latent-size": overcounted("all", "experts in a latent space"),
    **{
        f"moe-{name}": nothing("routing is assumed to be balanced")
        for name in (
            *("router-*", "grouped-gemm", "permute-fusion*", "aux-loss-coeff", "z-loss-coeff", "input-jitter-eps"),
            *("per-layer-logging", "enable-deepep", "deepep-*", "hybridep-*", "flex-*", "token-drop*", "extended-tp"),
            *("use-legacy-grouped-gemm", "use-upcycling", "upcycling-*", "shared-expert-overlap", "train-capacity-*"),
            *("apply-probs-on-input", "enable-routing-replay"),
        )
    },
    "num-virtual-stages-per-pipeline-rank": fact("virtual", "parallelism.virtual_stages"),
    **{
        name: lacking("an uneven pipeline split")
        for name in (
            *("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
            *("pipeline-model-parallel-layout",),
            *("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"),
        )
    },
    **{
        f"{stem}*": lacking("a vision encoder")
        for stem in (
            *("patch-dim", "img-", "image-", "vision-", "pixel-shuffle", "use-tiling", "max-num-tiles"),
            *("use-thumbnail", "language-model-type", "disable-vision-class-token", "decoder-seq-length"),
        )
    },
    "freeze-*": overcounted("states", "frozen layers"),
    "grpo-*": lacking("reinforcement learning"),
    "perform-rl-step": lacking("reinforcement learning"),
    **{
        f"{stem}*": nothing("generation is not estimated")
        for stem in (
            *("inference-", "temperature", "top-k", "top_p", "top-p", "out-seq-length", "prompt-path", "gt-path"),
            *("output", "input-", "num-partitions", "partition-id", "langrl-", "model-path"),
        )
    },
    **{
        f"{stem}*": nothing("no effect on memory")
        for stem in (
            *("attention-softmax-in-fp32", "pretrained-checkpoint", "use-te", "dataloader", "use-rope-scaling"),
            *("adam-", "lr", "min-lr", "clip-grad", "weight-decay", "init-", "train-", "eval-", "log-", "save", "load"),
            *("data-", "vocab-file", "merge-file", "tokenizer", "split", "tensorboard", "wandb", "master-"),
            *("node-rank",),
            *("container-", "task", "verbose", "eod-mask-loss", "calculate-per-token-loss", "auto-detect-ckpt-format"),
            *("rdzv", "seed", "distributed-", "dist-", "exit-", "num-workers", "rotary-", "norm-epsilon", "mock-data"),
            *("ckpt-", "timing-", "manual-gc", "profile", "apply-layernorm-1p", "use-checkpoint", "finetune", "legacy"),
        )
    },
}


def _finish(draft: Draft) -> None:
    facts, of_deepspeed = draft.facts, runs_deepspeed(draft)
    draft.default("training.implementation", "plain" if of_deepspeed else "megatron")
    (place_deepspeed if of_deepspeed else place_precision)(draft)
    _place_shape(draft)
    place_dropout(draft, 0.1)
    place_widths(draft)
    if "model.moe.num_experts" in draft.values:
        place_experts(draft)
    if facts.get("fp8"):
        recipe = facts.get("fp8_recipe", "delayed")  # arguments.py: its default
        if recipe in ("delayed", "tensorwise", "mxfp8", "blockwise"):
            draft.values["training.fp8"] = recipe
        else:
            draft.limit(f"fp8-recipe {recipe}", holds_memory=True)
    # arguments.py: by default native, which compiles the loss and saves the same
    if facts.get("fuses_loss") is True and facts.get("fusion") == "te":
        draft.default("training.loss", "fused")
    place_rows(draft)
    place_ranks(draft)
    place_recompute(draft)
    if not of_deepspeed:
        place_attention(draft)


def _place_shape(draft: Draft) -> None:
    """Set positions, norms, biases, heads and tied embeddings, with the defaults of arguments.py."""
    facts, values = draft.facts, draft.values
    if facts.get("no_positions") is True:
        draft.default("model.position_embedding", "none")
    draft.default("model.position_embedding", "learned")
    if values["model.position_embedding"] == "alibi" and not runs_deepspeed(draft):
        values["model.position_embedding"] = "none"
        draft.limit("ALiBi", "Megatron-Core has no such positions: none are counted", holds_memory=True)
    if facts.get("embedding_norm") is True and not runs_deepspeed(draft):
        draft.limit("a norm after the embedding", "Megatron-Core has no such norm: none is counted", holds_memory=True)
    draft.default("model.normalization", "layernorm")
    if facts.get("untied", False):
        values["model.tie_word_embeddings"] = False
    draft.default("model.tie_word_embeddings", True)
    biased = not facts.get("no_bias", False)
    for name in ("qkv_bias", "output_bias", "mlp_bias"):
        draft.default(f"model.{name}", biased)
    if facts.get("grouped") and type(facts.get("groups")) is int:
        values["model.num_key_value_heads"] = facts["groups"]
    if facts.get("latent") is True:
        values.pop("model.head_dim", None)  # kv-channels, which latent attention does not read
        values |= {f"model.mla.{ours}": facts.get(name, default) for name, (ours, default) in _LATENT.items()}


def _recognized(data: Mapping[str, Any]) -> bool:
    return "num-layers" in data and "hidden-size" in data


MEGATRON = FileFormat(
    "Megatron-LM", "Megatron-Core 0.14", FIELDS, _finish, _recognized, (REPLICAS,), framework="megatron"
)
