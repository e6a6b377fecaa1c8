"""NeMo's YAML of Megatron models (NeMo 1.x, `examples/nlp/language_modeling/conf`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.importers import megatron
from memcalc.importers.table import Draft, Framework, Meaning, fact, lacking, nothing, to

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

# The same arguments under NeMo's names.
_SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("max_position_embeddings", "micro_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "sequence_parallel", "global_batch_size"),
    *("attention_dropout", "hidden_dropout", "position_embedding_type", "num_moe_experts"),
)

# NeMo 1.23, megatron_gpt_config.yaml, megatron_llama_sft_config.yaml.
FIELDS: dict[str, Meaning] = {
    **{
        f"model.{name}": megatron.FIELDS[{"num_moe_experts": "num-experts"}.get(name, name.replace("_", "-"))]
        for name in _SAME
    },
    "model.encoder_seq_length": to("training.sequence_length"),
    "model.normalization": megatron.FIELDS["normalization"],
    "model.activation": to("model.mlp", _ACTIVATIONS),
    "model.bias": fact("bias", "model.qkv_bias, model.output_bias, model.mlp_bias"),
    "model.share_embeddings_and_output_weights": fact("shared", "model.tie_word_embeddings"),
    "model.virtual_pipeline_model_parallel_size": fact("virtual", "parallelism.virtual_stages"),
    "model.activations_checkpoint_granularity": to("training.recompute", {"selective": "selective", "full": "full"}),
    "model.activations_checkpoint_method": fact("method", "training.recompute"),
    "model.activations_checkpoint_num_layers": fact("recomputed", "training.recompute"),
    "model.optim.name": fact("optimizer", "training.optimizer"),
    "model.megatron_amp_O2": fact("o2", "training.recipe"),
    "model.mcore_gpt": nothing("Megatron-Core is counted"),
    "model.transformer_engine": nothing("Transformer Engine's modules are counted"),
    "model.fp8": fact("in_8_bits", "training.fp8"),
    "model.fp8_params": fact("fp8_params", "training.fp8_params"),
    "model.fp8*": nothing("how scales are found, not what is kept"),
    "model.peft*": lacking("NeMo's adapters"),
    "model.cpu_offloading*": lacking("activations on the host"),
    "model*": nothing("not about memory"),
    "trainer.precision": fact("precision", "training.dtype: precision of the step"),
    "trainer.devices": fact("per_node", "parallelism.data_parallel"),
    "trainer.num_nodes": fact("nodes", "parallelism.data_parallel"),
    "trainer*": nothing("not about memory"),
    "exp_manager*": nothing("logging"),
    "name": nothing(),
    "restore_from_path": nothing("loading is not sized"),
    "run*": nothing(),
    **{
        name: nothing("generation is not sized")
        for name in (
            *("inference*", "export*", "quantization*", "chatbot*", "chat", "server", "port", "web_*", "share"),
            *("username", "password", "prompts*", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
        )
    },
    "defaults": nothing("other files of the same folder, which are not read"),
}


def _finish(draft: Draft) -> None:
    facts = draft.facts
    precision = str(facts.get("precision", "bf16"))
    draft.default("training.dtype", "bf16" if "bf16" in precision else "fp16" if "16" in precision else "fp32")
    optimizer = str(facts.get("optimizer", "fused_adam"))
    draft.default("training.optimizer", "adamw")
    if "distributed" in optimizer:
        draft.default("parallelism.zero_stage", 1)
    facts["untied"] = facts.get("shared") is False
    facts["no_bias"] = facts.get("bias") is False
    facts["grouped"] = "groups" in facts
    if draft.values.get("training.dtype") == "fp32" or facts.get("o2") is False:
        draft.notes.append(
            "without megatron_amp_O2 NeMo keeps fp32 weights under autocast: counted as Megatron's recipe"
        )
    if facts.get("in_8_bits") is True:  # Transformer Engine's, by delayed scaling
        facts["fp8"] = True
        if facts.get("fp8_params") is True and draft.values.get("parallelism.zero_stage"):
            draft.values["training.fp8_params"] = True
    virtual = facts.get("virtual")
    if type(virtual) is int and virtual > 1:
        draft.values["parallelism.virtual_stages"] = virtual
        draft.values["parallelism.schedule"] = "interleaved"
    megatron.MEGATRON.finish(draft)


def _recognised(data: Mapping[str, Any]) -> bool:
    model = data.get("model")
    return isinstance(model, Mapping) and any(
        key in model for key in ("encoder_seq_length", "tensor_model_parallel_size")
    )


NEMO = Framework(
    "NeMo", "1.23", FIELDS, _finish, _recognised, (("parallelism.data_parallel", "how many copies share the data"),)
)
