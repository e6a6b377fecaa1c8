"""NeMo's YAML of Megatron models (NeMo 1.x, `examples/nlp/language_modeling/conf`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.frameworks.draft import Draft
from memcalc.importers.file_format import REPLICAS, FileFormat, Meaning, fact, lacking, nothing, overcounted, to
from memcalc.importers.megatron import table as megatron
from memcalc.importers.vocabulary import entries_of, place_vocabulary

_ACTIVATIONS = {
    "gelu": "gelu",
    "fast-gelu": "gelu",
    "openai-gelu": "gelu",
    "swiglu": "swiglu",
    "fast-swiglu": "swiglu",
    "geglu": "geglu",
    "fast-geglu": "geglu",
    "relu": "relu",
    "squared-relu": "relu",
}

_BF16 = ("bf16", "bfloat16")

# Megatron-LM arguments under NeMo's names.
_SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("max_position_embeddings", "micro_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "sequence_parallel", "global_batch_size"),
    *("attention_dropout", "hidden_dropout", "position_embedding_type", "num_moe_experts"),
)

_FUSIONS = (
    *("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_add_fusion", "cross_entropy_loss_fusion"),
    *("masked_softmax_fusion", "get_attention_mask_from_fusion", "grad_div_ar_fusion", "gradient_accumulation_fusion"),
    *("gradient_as_bucket_view", "async_grad_allreduce", "grad_allreduce_chunk_size_mb", "overlap_*", "batch_p2p_*"),
    *("sync_batch_comm", "tp_comm_overlap*", "ub_tp_comm_overlap*", "validation_param_sync_overlap", "sharp"),
    *("defer_embedding_wgrad_compute", "wgrad_deferral_limit", "persist_layer_norm", "use_flash_attention"),
    *("use_emha", "use_tp_pp_dp_mapping", "pipeline_model_parallel_split_rank"),
)
_REST = (
    *("name", "optim.*", "apply_query_key_layer_scaling", "attention_type", "apply_embedding_scaling", "layernorm_*"),
    *("add_*", "bert_*", "post_process", "pre_process", "onnx_safe", "openai_gelu", "gated_linear_unit", "chunk_size"),
    *("deteministic_mode", "deterministic_mode", "do_layer_norm_weight_decay", "hysteresis", "native_amp_*"),
    *("fp16_lm_cross_entropy", "gc_interval", "mcore_*", "megatron_l*", "reduce_amax", "reset_lr*", "rotary_*"),
    *("scale_positional_embedding", "skip_train", "use_te_rng_tracker", "window_size", "embedding_*", "eval_*"),
    *("tokens_head_bias", "logits_soft_cap", "output_dim", "classes_fraction", "num_classes", "drop_*", "ffn_dropout"),
    *("pretrained_model_path", "activations_checkpoint_recurrent"),
)
_OTHER_MODEL = ("an encoder, or a model other than a GPT", "a vision encoder", "retrieval")

_OTHERS: dict[str, Meaning] = {
    f"model.{name}": meaning
    for meaning, names in (
        (lacking("FSDP under NeMo", overcounts="all"), ("fsdp",)),
        (nothing("part of fsdp"), ("fsdp_*",)),
        (lacking("losses of several heads"), ("gather_with_grad", "local_loss")),
        (
            lacking(_OTHER_MODEL[0]),
            ("encoder.*", "decoder.*", "enc_*", "dec_*", "hyena*", "mamba_*", "share_*", "text*"),
        ),
        (lacking(_OTHER_MODEL[1]), ("mm_cfg*", "vision*", "img_*", "patch_dim", "num_channels", "use_siglip")),
        (lacking(_OTHER_MODEL[2]), ("retro*",)),
        (
            overcounted("activations", "an expert capacity factor"),
            ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"),
        ),
        (lacking("fp32 residuals"), ("fp32_residual_connection",)),
        (
            lacking("checkpoints of some micro-batches only"),
            ("num_micro_batches_with_partial_activation_checkpoints",),
        ),
        (lacking("different checkpointed layers in each stage"), ("activations_checkpoint_layers_per_pipeline",)),
        (lacking("CUDA graphs"), ("enable_cuda_graph",)),
        (lacking("other layer types"), ("headscale",)),
        (
            nothing("routing is assumed to be balanced"),
            ("moe_aux_*", "moe_z_*", "moe_grouped_gemm", "moe_router_load_*"),
        ),
        (nothing("changes fusion and overlap, not what is saved"), _FUSIONS),
        (nothing("data"), ("data*", "tokenizer*", "test_ds*", "answer_only_loss", "version", "seed")),
        (nothing("saving and loading"), ("dist_ckpt_*", "restore_from_path", "resume_from_checkpoint", "save_*")),
        (nothing("initialization of weights"), ("init_method_std", "use_scaled_init_method", "use_cpu_initialization")),
        (nothing("logging"), ("nsys_profile*", "megatron_timer*", "enable_megatron_timers", "dump_debug_*", "apex_*")),
        (nothing("no effect on memory"), _REST),
    )
    for name in names
}

# NeMo 1.23, megatron_gpt_config.yaml, megatron_llama_sft_config.yaml.
FIELDS: dict[str, Meaning] = {
    **{
        f"model.{name}": megatron.FIELDS[{"num_moe_experts": "num-experts"}.get(name, name.replace("_", "-"))]
        for name in _SAME
    },
    **to("training.sequence_length").at("model.encoder_seq_length model.seq_length"),
    "model.normalization": megatron.FIELDS["normalization"],
    "model.activation": to("model.mlp", _ACTIVATIONS),
    "model.bias": fact("bias", "model.qkv_bias, model.output_bias, model.mlp_bias"),
    "model.share_embeddings_and_output_weights": fact("shared", "model.tie_word_embeddings"),
    "model.virtual_pipeline_model_parallel_size": fact("virtual", "parallelism.virtual_stages"),
    "model.activations_checkpoint_granularity": to("training.recompute", {"selective": "selective", "full": "full"}),
    "model.activations_checkpoint_method": fact("method", "training.recompute"),
    "model.activations_checkpoint_num_layers": fact("recomputed", "training.recompute"),
    "model.transformer_block_type": fact("block", "model.norm_placement"),
    "model.normalize_attention_scores": nothing("scaling of attention scores"),
    "model.optim.name": fact("optimizer", "training.optimizer"),
    "model.optim.grad_sync_dtype": fact("synced", "training.gradient_dtype"),
    "model.megatron_amp_O2": fact("o2", "training.recipe"),
    "model.mcore_gpt": nothing("Megatron-Core is counted"),
    "model.transformer_engine": nothing("Transformer Engine's modules are counted"),
    "model.fp8": fact("in_8_bits", "training.fp8"),
    "model.fp8_params": fact("fp8_params", "training.fp8_params"),
    "model.fp8*": nothing("changes how scales are computed, not what is saved"),
    "model.peft*": overcounted("states", "NeMo's adapters"),
    "model.cpu_offloading*": overcounted("activations", "offload activations"),
    "model.qkv_bias": to("model.qkv_bias"),
    **to("model.vocab_size").at("model.vocab_size model.override_vocab_size"),
    "model.moe_router_topk": to("model.moe.num_experts_per_token"),
    "model.moe_ffn_hidden_size": to("model.moe.expert_intermediate_size"),
    "model.moe_layer_freq": megatron.FIELDS["moe-layer-freq"],
    "model.moe_token_dispatcher_type": megatron.FIELDS["moe-token-dispatcher-type"],
    "model.qk_layernorm": to("model.qk_norm"),
    "model.make_vocab_size_divisible_by": fact("divisible", "model.vocab_size"),
    "model.tokenizer.type": fact("tokenizer", "rows of the vocabulary"),
    "model.precision": nothing("trainer.precision sets it"),
    **_OTHERS,
    "trainer.precision": fact("precision", "training.dtype: precision of the step"),
    "trainer.devices": fact("per_node", "parallelism.data_parallel"),
    "trainer.num_nodes": fact("nodes", "parallelism.data_parallel"),
    "trainer*": nothing("no effect on memory"),
    "exp_manager.ema.enable": lacking("a moving average of the weights"),
    "exp_manager*": nothing("logging"),
    **nothing().at("name run*"),
    "restore_from_path": nothing("loading is not estimated"),
    "hydra*": nothing("search path of files"),
    **nothing("generation is not estimated").at(
        "inference* export* quantization* chatbot* chat server port web_* share username password prompts*",
        "tensor_model_parallel_size pipeline_model_parallel_size",
    ),
    "defaults": nothing("names other files of the same directory, which are not read"),
}


def _finish(draft: Draft) -> None:
    facts = draft.facts
    precision = str(facts.get("precision", "bf16"))
    draft.default("training.dtype", "bf16" if "bf16" in precision else "fp16" if "16" in precision else "fp32")
    optimizer = str(facts.get("optimizer", "fused_adam"))
    draft.default("training.optimizer", "adamw")
    if "distributed" in optimizer:
        draft.default("parallelism.zero_stage", 1)
        if draft.values["training.dtype"] == "bf16" and str(facts.get("synced")).rpartition(".")[2] in _BF16:
            draft.default("training.gradient_dtype", "bf16")  # Apex: the gradient buffer has the accumulation dtype
    if facts.get("block", "pre_ln") != "pre_ln":
        what = f"blocks of type {facts['block']}"
        draft.limit(what, "norms before each part are counted", holds_memory=True)
    facts["untied"] = facts.get("shared") is False
    facts["no_bias"] = facts.get("bias") is False
    facts["grouped"] = "groups" in facts
    if draft.values.get("training.dtype") == "fp32" or facts.get("o2") is False:
        draft.notes.append(
            "without megatron_amp_O2 NeMo keeps fp32 weights under autocast: counted as Megatron's recipe"
        )
    if facts.get("in_8_bits") is True:  # Transformer Engine's FP8 with delayed scaling
        facts["fp8"] = True
        if facts.get("fp8_params") is True and draft.values.get("parallelism.zero_stage"):
            draft.values["training.fp8_params"] = True
    virtual = facts.get("virtual")
    if type(virtual) is int and virtual > 1:
        draft.values["parallelism.virtual_stages"] = virtual
        draft.values["parallelism.schedule"] = "interleaved"
    if type(draft.values.get("model.hidden_size")) is int:
        draft.default("model.intermediate_size", 4 * draft.values["model.hidden_size"])
    entries = entries_of(facts.get("tokenizer"))
    if "model.vocab_size" not in draft.values and entries is not None:
        place_vocabulary(draft, entries, f"that of {facts['tokenizer']}")
    megatron.MEGATRON.finish(draft)


def _recognized(data: Mapping[str, Any]) -> bool:
    model = data.get("model")
    return isinstance(model, Mapping) and any(
        key in model for key in ("encoder_seq_length", "tensor_model_parallel_size")
    )


NEMO = FileFormat("NeMo", "1.23", FIELDS, _finish, _recognized, (REPLICAS,), framework="nemo")
