"""What families say of weights, buffers and defaults is what transformers builds, parameter by parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memcalc.layout.parameters import buffer_elements, count_parameters
from memcalc.spec.model_families import files
from memcalc.spec.model_families.conversion import known_families
from tests.spec.small import SMALL, model_spec
from tests.thinning import quick_covering, quick_every

OWN_NAMES = ("gpt", "gpt3")
SMALL_MOE: dict[str, Any] = SMALL | {"num_experts_per_tok": 2, "num_key_value_heads": 2}
SMALL_LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "full_attention_interval": 2,
}
SMALL_GEMMA4: dict[str, Any] = SMALL | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "intermediate_size": 96,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"],
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
SMALL_GEMMA4_MOE: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
SMALL_MAMBA: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 12,
    "n_routed_experts": 4,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 24,
}
SMALL_NEO: dict[str, Any] = SMALL | {"attention_types": [[["global", "local", "global"], 1]]}

# Each variant changes the layout of the weights; the first of each family is transformers' own default.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {}),
    ("gpt2", SMALL | {"tie_word_embeddings": False}),
    ("gpt2", SMALL | {"n_inner": 100}),
    ("gpt_neox", {}),
    ("gpt_neox", SMALL | {"use_parallel_residual": False, "attention_bias": False}),
    ("gpt_neox", SMALL | {"tie_word_embeddings": True, "intermediate_size": 96}),
    ("gptj", {}),
    ("gptj", SMALL | {"tie_word_embeddings": True, "rotary_dim": 16}),
    ("gptj", SMALL | {"n_inner": 100, "rotary_dim": 16}),
    ("codegen", {}),
    ("codegen", SMALL | {"tie_word_embeddings": True, "rotary_dim": 16}),
    ("codegen", SMALL | {"n_inner": 100, "rotary_dim": 16}),
    ("opt", {}),
    ("opt", SMALL | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    ("opt", SMALL | {"enable_bias": False, "word_embed_proj_dim": 32, "tie_word_embeddings": False}),
    ("bloom", {}),
    ("bloom", SMALL | {"tie_word_embeddings": False}),
    ("bloom", SMALL | {"n_layer": 5}),
    ("llama", {}),
    ("llama", SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": True, "intermediate_size": 96}),
    ("llama", SMALL | {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("mistral", {}),
    ("mistral", SMALL | {"num_key_value_heads": 4, "head_dim": 24}),
    ("mistral", SMALL | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("mixtral", {}),
    ("mixtral", SMALL_MOE | {"num_local_experts": 5, "intermediate_size": 40, "head_dim": 24}),
    ("mixtral", SMALL_MOE | {"num_local_experts": 3, "tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen2", SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("qwen2", SMALL | {"num_key_value_heads": 4, "intermediate_size": 96}),
    ("qwen3", {}),
    ("qwen3", SMALL | {"num_key_value_heads": 2, "attention_bias": True}),
    ("qwen3", SMALL | {"num_key_value_heads": None, "head_dim": 24, "tie_word_embeddings": True}),
    ("qwen3_moe", {}),
    ("qwen3_moe", SMALL_MOE | {"num_experts": 6, "head_dim": 24, "attention_bias": True}),
    ("qwen3_moe", SMALL_MOE | {"num_experts": 4, "moe_intermediate_size": 40, "tie_word_embeddings": True}),
    ("qwen3_moe", SMALL_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [0]}),
    ("qwen3_5_text", {}),
    ("qwen3_5_text", SMALL | SMALL_LINEAR | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("qwen3_5_text", SMALL | SMALL_LINEAR | {"layer_types": ["full_attention", *["linear_attention"] * 2]}),
    ("qwen3_5_moe_text", SMALL_MOE | SMALL_LINEAR | {"num_experts": 4, "moe_intermediate_size": 40}),
    ("qwen3_next", SMALL_MOE | SMALL_LINEAR | {"num_experts": 4, "shared_expert_intermediate_size": 24}),
    ("apertus", {}),
    ("apertus", SMALL | {"num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True}),
    ("hunyuan_v1_dense", SMALL | {"head_dim": 16, "attention_bias": True}),
    ("hunyuan_v1_dense", SMALL | {"head_dim": 24, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("nemotron", SMALL | {"head_dim": 16, "num_key_value_heads": 2}),
    ("nemotron", SMALL | {"head_dim": 24, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    ("nemotron_h", {}),
    ("nemotron_h", SMALL | SMALL_MAMBA | {"layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mlp_bias": True}),
    ("nemotron_h", SMALL | SMALL_MAMBA | {"hybrid_override_pattern": "MEM*E", "moe_latent_size": 20}),
    ("nemotron_h", SMALL | SMALL_MAMBA | {"hybrid_override_pattern": "MM", "use_bias": True, "use_conv_bias": False}),
    ("flex_olmo", SMALL_MOE | {"num_experts": 4, "intermediate_size": 40, "pad_token_id": 0}),
    ("gemma", {}),
    ("gemma", SMALL | {"num_key_value_heads": 1, "head_dim": 24, "attention_bias": True}),
    ("gemma", SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": False, "intermediate_size": 96}),
    ("gemma4_text", SMALL_GEMMA4),
    ("gemma4_text", SMALL_GEMMA4 | {"attention_bias": True, "num_global_key_value_heads": 1, "head_dim": 24}),
    ("gemma4_text", SMALL_GEMMA4 | {"attention_k_eq_v": True, "tie_word_embeddings": False}),
    ("gemma4_text", SMALL_GEMMA4 | SMALL_GEMMA4_MOE | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    ("phi3", {}),
    ("phi3", SMALL | {"pad_token_id": 0, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("phi3", SMALL | {"pad_token_id": 0, "num_key_value_heads": None, "intermediate_size": 96}),
    ("phi3", SMALL | {"pad_token_id": 0, "partial_rotary_factor": 0.75}),
    ("deepseek_v3", {}),
    ("deepseek_v3", SMALL | {"first_k_dense_replace": 2, "q_lora_rank": None, "n_shared_experts": 2}),
    ("deepseek_v3", SMALL | {"first_k_dense_replace": 0, "attention_bias": True, "tie_word_embeddings": True}),
    ("deepseek_v3", SMALL | {"first_k_dense_replace": 3, "n_routed_experts": 16}),
    ("gpt_neo", {}),
    ("gpt_neo", SMALL_NEO | {"intermediate_size": 96}),
    ("gpt_neo", SMALL_NEO | {"tie_word_embeddings": False}),
    ("gpt_bigcode", {}),
    ("gpt_bigcode", SMALL | {"multi_query": False, "n_inner": 100}),
    ("gpt_bigcode", SMALL | {"tie_word_embeddings": False}),
    ("falcon", {}),
    ("falcon", SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    ("falcon", SMALL | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "num_kv_heads": 1}),
    ("falcon", SMALL | {"parallel_attn": False, "multi_query": False, "alibi": True, "ffn_hidden_size": 96}),
    ("falcon", SMALL | {"num_ln_in_parallel_attn": 2, "tie_word_embeddings": False}),
    ("mpt", {}),
    ("mpt", {"n_layers": 3, "d_model": 64, "n_heads": 4, "vocab_size": 101, "expansion_ratio": 2}),
    ("mpt", {"n_layers": 2, "d_model": 32, "n_heads": 4, "no_bias": False, "tie_word_embeddings": False}),
    ("llama4_text", {}),
    ("llama4_text", SMALL | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_bias": True}),
    ("llama4_text", SMALL | {"moe_layers": [0], "interleave_moe_layer_step": 2, "tie_word_embeddings": True}),
    ("qwen2_moe", {}),
    ("qwen2_moe", SMALL_MOE | {"num_experts": 6, "decoder_sparse_step": 2, "qkv_bias": False}),
    ("qwen2_moe", SMALL_MOE | {"num_experts": 4, "mlp_only_layers": [1], "tie_word_embeddings": True}),
    ("gemma2", {}),
    ("gemma2", SMALL | {"num_key_value_heads": 1, "head_dim": 24, "attention_bias": True}),
    ("gemma2", SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": False, "intermediate_size": 96}),
    ("gemma3_text", {}),
    ("gemma3_text", SMALL | {"num_hidden_layers": 6, "num_key_value_heads": 1, "head_dim": 24, "attention_bias": True}),
    ("gemma3_text", SMALL | {"num_hidden_layers": 7, "tie_word_embeddings": False, "intermediate_size": 96}),
    ("phi", {}),
    ("phi", SMALL | {"qk_layernorm": True, "num_key_value_heads": 2, "partial_rotary_factor": 0.25}),
    ("phi", SMALL | {"tie_word_embeddings": True, "intermediate_size": 96}),
    ("phimoe", {}),
    ("phimoe", SMALL_MOE | {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}),
    ("phimoe", SMALL_MOE | {"intermediate_size": 40, "tie_word_embeddings": True}),
    ("stablelm", {}),
    ("stablelm", SMALL | {"num_key_value_heads": 2, "qk_layernorm": True, "use_qkv_bias": True}),
    ("stablelm", SMALL | {"num_key_value_heads": 4, "use_parallel_residual": True, "tie_word_embeddings": True}),
    ("starcoder2", {}),
    ("starcoder2", SMALL | {"use_bias": False, "num_key_value_heads": 4}),
    ("starcoder2", SMALL | {"tie_word_embeddings": False, "intermediate_size": 96}),
    ("olmo", {}),
    ("olmo", SMALL | {"num_key_value_heads": 2, "attention_bias": True}),
    ("olmo", SMALL | {"tie_word_embeddings": True, "intermediate_size": 96}),
    ("olmo2", {}),
    ("olmo2", SMALL | {"num_key_value_heads": 2, "attention_bias": True}),
    ("olmo2", SMALL | {"tie_word_embeddings": True, "intermediate_size": 96}),
    ("olmo3", {}),
    ("olmo3", SMALL | {"num_hidden_layers": 4, "num_key_value_heads": 2, "attention_bias": True}),
    ("olmo3", SMALL | {"num_hidden_layers": 5, "tie_word_embeddings": True, "intermediate_size": 96}),
    ("olmoe", {}),
    ("olmoe", SMALL_MOE | {"num_experts": 6, "attention_bias": True}),
    ("olmoe", SMALL_MOE | {"intermediate_size": 40, "tie_word_embeddings": True}),
    ("granite", {}),
    ("granite", SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": True, "intermediate_size": 96}),
    ("granite", SMALL | {"attention_bias": True, "mlp_bias": True}),
    ("granitemoe", {}),
    ("granitemoe", SMALL_MOE | {"num_local_experts": 6, "attention_bias": True}),
    ("granitemoe", SMALL_MOE | {"intermediate_size": 40, "tie_word_embeddings": True}),
    ("cohere", {}),
    ("cohere", SMALL | {"use_qk_norm": True, "num_key_value_heads": 2, "attention_bias": True}),
    ("cohere", SMALL | {"tie_word_embeddings": False, "intermediate_size": 96}),
    ("cohere2", {}),
    ("cohere2", SMALL | {"num_key_value_heads": 2, "attention_bias": True}),
    ("cohere2", SMALL | {"tie_word_embeddings": False, "intermediate_size": 96}),
    ("deepseek_v2", {"num_experts_per_tok": 6}),
    ("deepseek_v2", SMALL_MOE | {"first_k_dense_replace": 1, "q_lora_rank": None, "n_shared_experts": 1}),
    ("deepseek_v2", SMALL_MOE | {"attention_bias": True, "mlp_bias": True, "n_routed_experts": 4}),
    ("glm", {}),
    ("glm", SMALL | {"pad_token_id": 0, "num_key_value_heads": 1, "head_dim": 24, "attention_bias": False}),
    ("glm", SMALL | {"pad_token_id": 0, "partial_rotary_factor": 1.0, "tie_word_embeddings": True}),
    ("glm4", {}),
    ("glm4", SMALL | {"pad_token_id": 0, "num_key_value_heads": 1, "head_dim": 24, "attention_bias": False}),
    ("glm4", SMALL | {"pad_token_id": 0, "partial_rotary_factor": 1.0, "tie_word_embeddings": True}),
    ("glm4_moe", {}),
    ("glm4_moe", SMALL_MOE | {"use_qk_norm": True, "head_dim": 24, "attention_bias": True, "n_shared_experts": 2}),
    ("glm4_moe", SMALL_MOE | {"first_k_dense_replace": 2, "n_routed_experts": 4, "tie_word_embeddings": True}),
    ("gpt_oss", {}),
    ("gpt_oss", SMALL_MOE | {"num_local_experts": 4, "attention_bias": False, "intermediate_size": 40}),
    ("gpt_oss", SMALL_MOE | {"num_local_experts": 6, "head_dim": 24, "tie_word_embeddings": True}),
    ("smollm3", {}),
    ("smollm3", SMALL | {"pad_token_id": 0, "attention_bias": True, "mlp_bias": True}),
    ("smollm3", SMALL | {"pad_token_id": 0, "num_key_value_heads": 2, "tie_word_embeddings": False}),
    ("exaone4", {}),
    ("exaone4", SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("exaone4", SMALL | {"num_key_value_heads": 4, "intermediate_size": 96}),
    ("ernie4_5", {}),
    ("ernie4_5", SMALL | {"use_bias": True, "num_key_value_heads": 1, "head_dim": 24}),
    ("ernie4_5", SMALL | {"tie_word_embeddings": False, "intermediate_size": 96}),
    ("ernie4_5_moe", {}),
    ("ernie4_5_moe", SMALL | {"num_key_value_heads": 2, "use_bias": True, "moe_layer_interval": 2}),
    ("ernie4_5_moe", SMALL | {"num_hidden_layers": 5, "moe_layer_end_index": 3, "tie_word_embeddings": False}),
    ("minimax_m2", {}),
    ("minimax_m2", SMALL_MOE | {"num_local_experts": 4, "head_dim": 24, "rotary_dim": 12}),
    ("minimax_m2", SMALL_MOE | {"num_local_experts": 6, "intermediate_size": 40, "tie_word_embeddings": True}),
    ("arcee", {}),
    ("arcee", SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": True, "intermediate_size": 96}),
    ("arcee", SMALL | {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("seed_oss", {}),
    ("seed_oss", SMALL | {"num_key_value_heads": 2, "attention_bias": False, "attention_out_bias": True}),
    ("seed_oss", SMALL | {"mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True}),
    ("nanochat", {}),
    ("nanochat", SMALL | {"num_key_value_heads": 2, "attention_bias": True}),
    ("nanochat", SMALL | {"num_key_value_heads": 4, "intermediate_size": 96, "tie_word_embeddings": True}),
]


def meta_model(model_type: str, changes: dict[str, Any]) -> tuple[dict[str, object], Any]:
    """The config as its config.json would hold it, and the model without its weights' memory."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return json.loads(json.dumps(config.to_dict())), model


def traits_of(variant: tuple[str, dict[str, Any]]) -> list[str]:
    """The family, and the fields that are not those of its small model."""
    model_type, changes = variant
    return [model_type, *(name for name, value in changes.items() if SMALL.get(name) != value)]


@pytest.mark.parametrize(("model_type", "changes"), quick_covering(traits_of, VARIANTS, unpack=True))
def test_parameters_and_buffers_equal_those_of_transformers(model_type: str, changes: dict[str, Any]) -> None:
    """The model built from a config.json has as many parameters, tied ones once, and buffers as we count."""
    config, model = meta_model(model_type, changes)
    spec = model_spec(config)

    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(spec)
    assert sum(buffer.numel() for buffer in model.buffers()) == buffer_elements(spec)


def their_default(config: Any, key: str) -> object:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    value: object = config
    return value


@pytest.mark.parametrize("model_type", [name for name in known_families() if name not in OWN_NAMES])
def test_defaults_are_those_of_transformers_configuration_classes(model_type: str) -> None:
    """A key that config.json leaves out has the value that transformers gives it."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(model_type)
    theirs.allow_global_per_layer_attribute_access = True  # Gemma 4's head_dim differs between layers
    for key, ours in files.parsed(model_type).defaults.items():
        # null: we leave the field unset, and derive it as transformers' class does; seq_length is BLOOM's own key, and
        # the classes of Qwen3.5 read full_attention_interval without keeping it, as that of Gemma 4 global_head_dim.
        if ours is not None and key not in ("seq_length", "full_attention_interval", "global_head_dim"):
            assert their_default(theirs, key) == ours, key


@pytest.mark.parametrize(
    "model_type",
    quick_every(
        3,
        [
            name
            for name in known_families()
            # transformers cannot build the last two from their defaults: RoPE needs a head_dim, attention key/value
            # heads; the default Gemma 4 has per-layer inputs, which have no formulas
            if name
            not in (*OWN_NAMES, "bloom", "deepseek_v2", "deepseek_v3", "gemma4_text", "hunyuan_v1_dense", "nemotron")
        ],
    ),
)
def test_a_config_with_only_its_sizes_reads_as_transformers_reads_it(model_type: str) -> None:
    """Leaving out every key that has a default changes nothing."""
    config, model = meta_model(model_type, {})
    needed = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    keys = {key for field in needed for key in files.parsed(model_type).read[field]}
    sparse = {key: value for key, value in config.items() if key in keys or key == "model_type"}

    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(model_spec(sparse))
