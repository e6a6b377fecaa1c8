"""NeMo 2 recipes as written by nemo-run: YAML with blocks that name their classes by `_target_`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.frameworks.draft import Draft
from memcalc.importers.file_format import REPLICAS, FileFormat, Meaning, fact, lacking, nothing, overcounted, to
from memcalc.importers.megatron import table as megatron
from memcalc.importers.models import named_model, place_model
from memcalc.importers.nemo.classes import place_class, place_tokenizer

# Fields of TransformerConfig that are Megatron-LM arguments, by the same name or another one.
_SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("position_embedding_type", "normalization", "add_qkv_bias", "qk_layernorm", "attention_dropout"),
    *("hidden_dropout", "recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers"),
    *("distribute_saved_activations", "cpu_offloading*", "multi_latent_attention", "q_lora_rank", "kv_lora_rank"),
    *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mtp_num_layers", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_shared_expert_overlap", "moe_layer_freq"),
    *("moe_token_dispatcher_type", "moe_layer_recompute", "moe_expert_capacity_factor", "moe_router_*"),
    *("moe_pad_expert_input_to_capacity", "moe_grouped_gemm", "moe_permute_fusion*", "moe_aux_loss_coeff"),
    *("moe_z_loss_coeff", "moe_input_jitter_eps", "moe_enable_deepep", "moe_deepep_*", "moe_token_drop*"),
    *("moe_apply_probs_on_input", "moe_per_layer_logging", "moe_use_legacy_grouped_gemm"),
)
_CONFIG: dict[str, Meaning] = {
    "_target_": fact("class", "model"),
    "num_moe_experts": megatron.FIELDS["num-experts"],
    "share_embeddings_and_output_weights": fact("shared", "model.tie_word_embeddings"),
    "add_bias_linear": fact("bias", "model.qkv_bias, model.output_bias, model.mlp_bias"),
    "gated_linear_unit": fact("gated", "model.mlp"),
    **fact("activation", "model.mlp").at("activation_func activation_func._target_"),
    "make_vocab_size_divisible_by": fact("divisible", "model.vocab_size"),
    "vocab_size": to("model.vocab_size"),
    "seq_length": fact("positions", "training.sequence_length, model.max_position_embeddings"),
    "tokenizer": fact("entries", "model.vocab_size"),
    "fp8*": nothing("trainer.plugins sets it"),
    "window_*": nothing("masks"),
    **lacking("CUDA graphs").at("enable_cuda_graph external_cuda_graph"),
    "attention_backend": fact("attention", "training.attention"),
    "attention_backend.*": nothing("part of attention_backend"),
    "cuda_graph_*": nothing("part of CUDA graphs"),
    "fp32_residual_connection": lacking("fp32 residuals"),
    "heterogeneous_layers_*": lacking("layers with different configurations"),
    "qk_l2_norm": lacking("norms of queries and keys without weights"),
    **nothing().at(
        "mtp_loss_scaling_factor init_* output_layer_init* layernorm_* rotary_* rope_* *_factor old_context_len",
        "seq_len_interpolation_factor attention_softmax_in_fp32 apply_query_key_* fp16_lm_* bf16 fp16 params_dtype*",
        "pipeline_dtype* autocast* forward_step_fn* data_step_fn* flash_* generation_config* yarn_* mscale*",
        "deterministic_mode cp_comm_type softmax_* query_pre_attn_scalar grad_* barrier_* timers* finalize_* *_func",
    ),
    "transformer_layer_spec*": nothing("Transformer Engine's modules are counted"),
    **nothing("changes fusion and overlap, not what is saved").at(
        "*_fusion cross_entropy_fusion_impl overlap_* tp_comm_* persist_layer_norm batch_p2p_*",
        "deallocate_pipeline_outputs defer_embedding_* wgrad_* use_transformer_engine_* sharp scatter_embedding_*",
        "parallel_output apply_rope_fusion use_te_* disable_parameter_*",
    ),
}

# Fields of MegatronStrategy and of data modules that are Megatron-LM arguments.
_STRATEGY = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "account_for_embedding_in_pipeline_split"),
    *("account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout"),
)
_UNEVEN = megatron.FIELDS["decoder-first-pipeline-num-layers"]
_FSDP = megatron.FIELDS["use-megatron-fsdp"]


def _note_instances(draft: Draft, value: Any) -> None:
    if value != 1:
        what = "several instances of the distributed optimizer"
        draft.limit(what, "each is unsharded; one is counted", holds_memory=True)


_INSTANCES = Meaning("mapped", "parallelism.zero_stage", _note_instances)

# NeMo 2.6, nemo/collections/llm/recipes, nemo/lightning/pytorch; Megatron-Core 0.14, TransformerConfig.
FIELDS: dict[str, Meaning] = {
    **{f"model.config.{name}": megatron.FIELDS[name.replace("_", "-")] for name in _SAME},
    **{f"model.config.{name}": meaning for name, meaning in _CONFIG.items()},
    "_target_": fact("verb", "training.finetune"),
    "_partial_": nothing("arguments of the function call"),
    "model._target_": nothing("its config sets the sizes"),
    "model.model_name": named_model(),
    "model.tokenizer*": nothing("data.tokenizer, or the model's own"),
    "model.optim*": lacking("an optimizer of the model's own", "give it as optim"),
    "model.model_transform*": lacking("a change of the model"),
    "data.micro_batch_size": fact("micro", "training.micro_batch_size"),
    "data.global_batch_size": fact("global", "training.global_batch_size"),
    "data.seq_length": to("training.sequence_length"),
    "data.tokenizer.pretrained_model_name": fact("tokenizer", "model.vocab_size"),
    "data.tokenizer.model_name": fact("tokenizer", "model.vocab_size"),
    "data.tokenizer.vocab_size": fact("null_entries", "model.vocab_size"),
    **nothing("data").at("data* tokenizer*"),
    "tokenizer": fact("whose_tokenizer", "model.vocab_size"),
    "tokenizer.pretrained_model_name": fact("tokenizer", "model.vocab_size"),
    "optim.config.optimizer": to("training.optimizer", {"adam": "adamw", "sgd": "momentum"}),
    "optim.config.use_distributed_optimizer": fact("distributed", "parallelism.zero_stage"),
    "optim.config.use_precision_aware_optimizer": overcounted("states", "low-precision moments and gradients"),
    "optim.config.optimizer_cpu_offload": overcounted("states", "optimizer states in host memory"),
    "optim.config*": nothing("changes the update, not the optimizer states"),
    "optim.optimizer_fn*": lacking("an optimizer of PyTorch in place of Megatron's", "Megatron's is counted"),
    "optim*": nothing(),
    "trainer.devices": fact("per_node", "parallelism.data_parallel"),
    "trainer.num_nodes": fact("nodes", "parallelism.data_parallel"),
    "trainer.strategy._target_": fact("strategy", "parallelism.engine"),
    **{f"trainer.strategy.{name}": megatron.FIELDS[name.replace("_", "-")] for name in _STRATEGY},
    "trainer.strategy.virtual_pipeline_model_parallel_size": fact("virtual", "parallelism.virtual_stages"),
    "trainer.strategy.num_layers_in_first_pipeline_stage": _UNEVEN,
    "trainer.strategy.num_layers_in_last_pipeline_stage": _UNEVEN,
    "trainer.strategy.fsdp": _FSDP,
    "trainer.strategy.ddp.use_custom_fsdp": _FSDP,
    "trainer.strategy.ddp.use_megatron_fsdp": _FSDP,
    "trainer.strategy.ddp.grad_reduce_in_fp32": nothing("trainer.plugins sets it and takes precedence"),
    "trainer.strategy.ddp*": nothing("changes when gradients are summed, not what is saved"),
    "trainer.strategy.num_distributed_optimizer_instances": _INSTANCES,
    **{
        f"trainer.strategy.{name}": nothing("changes the implementation, not what is saved")
        for name in (
            *("ckpt_*", "save_ckpt_format", "pipeline_dtype*", "gradient_as_bucket_view", "use_*", "moe_extended_tp"),
            *("microbatch_group_*", "pipeline_model_parallel_comm_backend", "find_unused_*", "lazy_init", "setup_*"),
            *("init_model_parallel", "replace_progress_bar", "progress_interval", "megatron_log_level", "nccl_*"),
            *("restore_config*", "data_sampler*", "cluster_environment*", "checkpoint_io*", "timeout*"),
        )
    },
    "trainer.strategy.encoder_*": lacking("an encoder's own parallelism"),
    "trainer.plugins": fact("plugins", "training.dtype, training.fp8, training.gradient_dtype"),
    **fact("precision", "training.dtype").at("trainer.plugins.precision trainer.precision"),
    "trainer.plugins.fp8": fact("fp8", "training.fp8"),
    "trainer.plugins.fp8_recipe": fact("fp8_recipe", "training.fp8"),
    **fact("fp8_params", "training.fp8_params").at("trainer.plugins.fp8_param_gather trainer.plugins.fp8_params"),
    "trainer.plugins.grad_reduce_in_fp32": fact("reduces_in_fp32", "training.gradient_dtype"),
    "trainer.plugins.fp4*": lacking("FP4 matmuls"),
    **{
        f"trainer.plugins.{name}": lacking("layers without FP8")
        for name in ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    },
    "trainer.plugins.*": nothing("changes the implementation, not what is saved"),
    "trainer.callbacks": nothing("logging, and overlaps"),
    "trainer*": nothing("no effect on memory"),
    "peft._target_": fact("peft", "training.finetune"),
    "peft.target_modules": fact("targets", "training.lora.target_modules"),
    "peft.dim": fact("rank", "training.lora.rank"),
    "peft*": nothing("part of peft"),
    "log*": nothing("logging"),
    "resume*": nothing("loading is not estimated"),
}


def _finish(draft: Draft) -> None:
    facts, values = draft.facts, draft.values
    for plugin in facts["plugins"] if isinstance(facts.get("plugins"), list) else ():
        if isinstance(plugin, Mapping):
            facts |= {ours: plugin[name] for name, ours in _PLUGIN.items() if plugin.get(name) is not None}
    place_class(draft, FIELDS)
    place_model(draft)
    _precision(draft)
    # data modules: default sequences in one forward, and in a step
    draft.default("training.micro_batch_size", facts.get("micro", 4))
    facts.setdefault("global", 8)
    draft.default("training.sequence_length", 2048)
    draft.default("model.max_position_embeddings", facts.get("positions", values["training.sequence_length"]))
    facts["untied"] = facts.get("shared") is False
    facts["no_bias"] = facts.get("bias") is False
    facts["grouped"] = "groups" in facts
    _activation(draft)
    draft.default("training.optimizer", "adamw")
    if (
        facts.get("distributed", "optim.config._target_" not in draft.given_fields) is True
    ):  # gpt/model/base.py: on by default
        draft.default("parallelism.zero_stage", 1)
    virtual = facts.get("virtual")
    facts["virtual"] = virtual if type(virtual) is int else None
    if type(values.get("model.hidden_size")) is int:  # TransformerConfig, gated or not
        draft.default("model.intermediate_size", 4 * values["model.hidden_size"])
    facts.setdefault("per_node", 1)
    facts.setdefault("nodes", 1)
    place_tokenizer(draft)
    megatron.MEGATRON.finish(draft)
    if facts.get("fp8_params") is True and values.get("parallelism.zero_stage") and "training.fp8" in values:
        values["training.fp8_params"] = True
    if facts.get("peft"):
        what = "NeMo's adapters on Megatron's modules"
        draft.limit(what, "all weights are counted as trained", holds_memory=False, overcounts="states")
    if "Megatron" not in str(facts.get("strategy", "Megatron")):
        draft.limit(str(facts["strategy"]), "Megatron's strategy and modules are counted", holds_memory=True)


_PLUGIN = {
    "precision": "precision",
    "fp8": "fp8",
    "fp8_recipe": "fp8_recipe",
    "fp8_param_gather": "fp8_params",
    "grad_reduce_in_fp32": "reduces_in_fp32",
}


def _precision(draft: Draft) -> None:
    facts = draft.facts
    precision = str(facts.get("precision", "bf16"))
    draft.default("training.dtype", "bf16" if "bf16" in precision else "fp16" if "16" in precision else "fp32")
    if facts.get("reduces_in_fp32") is False and draft.values["training.dtype"] != "fp32":  # mixed_precision.py
        draft.default("training.gradient_dtype", draft.values["training.dtype"])


def _activation(draft: Draft) -> None:
    facts = draft.facts
    name, gated = str(facts.get("activation", "gelu")).rpartition(".")[2], facts.get("gated") is True
    known = {"silu": "swiglu", "gelu": "geglu"} if gated else {"gelu": "gelu", "relu": "relu", "squared_relu": "relu"}
    name = "gelu" if name in ("openai_gelu", "quick_gelu", "fast_gelu") else name
    draft.translate("model.mlp", name, known)


def _recognized(data: Mapping[str, Any]) -> bool:
    model, trainer = data.get("model"), data.get("trainer")
    blocks = (block for block in (model, trainer) if isinstance(block, Mapping))
    return any(str(block.get("_target_", "")).startswith("nemo.") for block in blocks)


NEMO_RECIPE = FileFormat("NeMo 2", "2.6", FIELDS, _finish, _recognized, (REPLICAS,), framework="nemo")
