"""Families are data: what they say must be what transformers builds, and bad configs must end in one clear message."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.api import estimate
from memcalc.errors import InputError
from memcalc.estimation.parameters import buffer_elements, count_parameters
from memcalc.spec import family_files, family_values
from memcalc.spec.derive import derive_model
from memcalc.spec.families import family_defaults, known_families, read_hf_config
from memcalc.spec.model import MlaSpec, ModelSpec, MoeSpec

OWN_NAMES = ("gpt", "gpt3")
SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 48,
}
SMALL_MOE: dict[str, Any] = SMALL | {"num_experts_per_tok": 2, "num_key_value_heads": 2}
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
    ("gemma", {}),
    ("gemma", SMALL | {"num_key_value_heads": 1, "head_dim": 24, "attention_bias": True}),
    ("gemma", SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": False, "intermediate_size": 96}),
    ("phi3", {}),
    ("phi3", SMALL | {"pad_token_id": 0, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("phi3", SMALL | {"pad_token_id": 0, "num_key_value_heads": None, "intermediate_size": 96}),
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


def small_config(model_type: str = "llama", **changes: object) -> dict[str, object]:
    return {"model_type": model_type, **SMALL, **changes}


def model_spec(config: dict[str, object]) -> ModelSpec:
    return ModelSpec.model_validate(derive_model(read_hf_config(config, "config.json")))


def meta_model(model_type: str, changes: dict[str, Any]) -> tuple[dict[str, object], Any]:
    """The config as its config.json would hold it, and the model without its weights' memory."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return json.loads(json.dumps(config.to_dict())), model


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
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
    for key, ours in family_files.parsed(model_type).defaults.items():
        # null: we leave the field unset, and derive it as transformers' class does; seq_length is BLOOM's own key.
        if ours is not None and key != "seq_length":
            assert their_default(theirs, key) == ours, key


@pytest.mark.parametrize(
    "model_type", [name for name in known_families() if name not in (*OWN_NAMES, "bloom", "deepseek_v2", "deepseek_v3")]
)
def test_a_config_with_only_its_sizes_reads_as_transformers_reads_it(model_type: str) -> None:
    """Leaving out every key that has a default changes nothing."""
    config, model = meta_model(model_type, {})
    needed = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    keys = {key for field in needed for key in family_files.parsed(model_type).read[field]}
    sparse = {key: value for key, value in config.items() if key in keys or key == "model_type"}

    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(model_spec(sparse))


@pytest.mark.parametrize("name", known_families())
def test_each_family_speaks_of_fields_that_exist(name: str) -> None:
    """A field that ModelSpec does not have would be refused only when a user meets it."""
    fields = set(ModelSpec.model_fields)
    fields |= {f"moe.{field}" for field in MoeSpec.model_fields} | {f"mla.{field}" for field in MlaSpec.model_fields}
    family = family_files.parsed(name)

    assert set(family.read) <= fields
    assert set(family_files.flattened(family.fixed)) <= fields
    assert set(family.translate) <= set(family.read)
    assert (
        fields
        >= family_values.BOOLEANS
        | family_values.PROBABILITIES
        | family_values.COUNTS
        | family_values.CHOICES
        | family_values.LAYERS
        | family_values.WINDOWS
    )
    assert not set(family.read) & set(family_files.flattened(family.fixed))
    assert all(not rules[-1].when for rules in family.rules.values())


@pytest.mark.parametrize("name", known_families())
def test_a_family_settles_everything_but_sizes(name: str) -> None:
    """`architecture: X` alone gives every flag and choice that distinguishes X, and not one size."""
    defaults = family_files.flattened(family_defaults(name))
    kinds = family_values.BOOLEANS | family_values.PROBABILITIES | family_values.CHOICES | family_values.WINDOWS
    fixed = set(family_files.flattened(family_files.parsed(name).fixed))

    assert set(defaults) - kinds <= fixed
    assert {"position_embedding", "normalization", "mlp", "qkv_bias", "tie_word_embeddings"} <= set(defaults)


def test_llama_defaults() -> None:
    """RMSNorm, rotary positions, SwiGLU, no biases, an untied head."""
    assert family_defaults("llama") == {
        "position_embedding": "rope",
        "normalization": "rmsnorm",
        "norms_per_layer": 2,
        "mlp": "swiglu",
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
    }


def test_gpt3_is_gpt2_made_larger() -> None:
    """GPT-3 and its short name take GPT-2's block, dropout 0.1 included."""
    assert family_defaults("gpt3") == family_defaults("gpt2") == family_defaults("gpt")
    assert family_defaults("gpt3")["attention_dropout"] == 0.1


def test_family_defaults_cannot_be_spoiled_by_a_caller() -> None:
    """Each caller gets its own copy."""
    first = family_defaults("deepseek_v3")
    first["mlp"] = "relu"
    moe = first["moe"]
    assert isinstance(moe, dict)
    moe["router_correction_bias"] = False

    assert family_defaults("deepseek_v3")["mlp"] == "swiglu"
    assert family_defaults("deepseek_v3")["moe"] == {"router_correction_bias": True}


def test_dropout_keys_become_ours() -> None:
    """GPT-2 names three rates; NeoX has one for residuals and embedding."""
    gpt2 = read_hf_config(small_config("gpt2", attn_pdrop=0.3, resid_pdrop=0.2, embd_pdrop=0), "config.json")
    neox = read_hf_config(small_config("gpt_neox", hidden_dropout=0.25), "config.json")

    assert (gpt2["attention_dropout"], gpt2["residual_dropout"], gpt2["embedding_dropout"]) == (0.3, 0.2, 0.0)
    assert (neox["attention_dropout"], neox["residual_dropout"], neox["embedding_dropout"]) == (0.0, 0.25, 0.25)


def test_one_key_can_set_two_fields() -> None:
    """LLaMA's attention_bias is the bias of q, k, v and of the output projection."""
    block = read_hf_config(small_config(attention_bias=True), "config.json")

    assert (block["qkv_bias"], block["output_bias"], block["mlp_bias"]) == (True, True, False)


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        (small_config("lama"), ["config.json: model_type", "'lama'", "Nearest: llama", "bloom, codegen"]),
        (small_config("../llama"), ["config.json: model_type", "'../llama'"]),
        ({"num_layers": 3}, ["model_type is missing", '"model_type": "llama"']),
        ({"model_type": 7}, ["model_type = 7", "not a text"]),
        ({"model_type": "llava", "text_config": {}}, ["several modalities", "text_config"]),
        ({"model_type": "llama"}, ["num_hidden_layers is missing", "no default"]),
        (small_config(hidden_size=True), ["config.json: hidden_size: True", "whole number", "digits"]),
        (small_config(hidden_size="4096"), ["config.json: hidden_size: '4096'", "without quotes"]),
        (small_config(hidden_size=4096.0), ["config.json: hidden_size: 4096.0", "whole number"]),
        (small_config(hidden_size=-1), ["config.json: hidden_size: -1", "from 1 to 2^40"]),
        (small_config(hidden_size=2**41), ["config.json: hidden_size: 2199023255552"]),
        (small_config(hidden_size=10**5000), ["config.json: hidden_size: a huge number"]),
        (small_config(hidden_size=None), ["hidden_size is missing"]),
        (small_config(vocab_size=[1] * 999), ["config.json: vocab_size: [1, 1", "..."]),
        (small_config(num_key_value_heads=0), ["config.json: num_key_value_heads: 0"]),
        (small_config(attention_dropout=float("nan")), ["config.json: attention_dropout: nan", "dropout rate"]),
        (small_config(attention_dropout=1), ["config.json: attention_dropout: 1"]),
        (small_config(attention_dropout=True), ["config.json: attention_dropout: True"]),
        (small_config(attention_bias="yes"), ["config.json: attention_bias: 'yes'", "true or false"]),
        (small_config(attention_bias=1), ["config.json: attention_bias: 1", "true nor false"]),
        (small_config(hidden_act="tanh"), ["config.json: hidden_act: 'tanh'", "llama", "silu"]),
        (small_config(hidden_act=["silu"]), ["config.json: hidden_act: ['silu']"]),
        (small_config("qwen3_moe", mlp_only_layers=["1"]), ["config.json: mlp_only_layers: ['1']", "list of layers"]),
        (small_config("qwen3_moe", decoder_sparse_step=True), ["decoder_sparse_step: True", "whole number from 1"]),
        (small_config("llama4_text", moe_layers=3), ["config.json: moe_layers: 3", "list of layers"]),
        (small_config("llama4_text", moe_layers=[], num_hidden_layers=2**30), ["moe_layers", "1073741824 layers"]),
        (small_config("ernie4_5_moe", moe_layer_end_index=-2), ["moe_layer_end_index: -2", "from 0"]),
        (small_config("phi", partial_rotary_factor=1.5), ["partial_rotary_factor: 1.5", "not a share"]),
        (small_config("phi", rope_parameters={"partial_rotary_factor": 0}), ["factor: 0", "not a share"]),
        (small_config("deepseek_v3", n_shared_experts=-1), ["config.json: n_shared_experts: -1", "from 0"]),
    ],
)
def test_a_bad_config_is_refused_with_key_value_rule_and_remedy(
    config: dict[str, object], fragments: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        read_hf_config(config, "config.json")

    for fragment in fragments:
        assert fragment in str(caught.value)
    assert caught.value.remedy
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "heads", "norms", "position"),
    [
        ({}, 1, 1, "rope"),
        ({"multi_query": False}, 4, 1, "rope"),
        ({"multi_query": False, "num_kv_heads": 2}, 4, 1, "rope"),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2, 2, "rope"),
        ({"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}, 2, 1, "rope"),
        ({"parallel_attn": False, "alibi": True}, 1, 2, "alibi"),
    ],
)
def test_the_first_case_that_holds_counts(changes: dict[str, Any], heads: int, norms: int, position: str) -> None:
    """Falcon's 7B, 40B and 11B are told apart by flags, some of which make others mute."""
    block = read_hf_config(small_config("falcon", **changes), "config.json")

    assert (block["num_key_value_heads"], block["norms_per_layer"], block["position_embedding"]) == (
        heads,
        norms,
        position,
    )


def test_layers_with_experts_are_read_from_lists_intervals_and_ends() -> None:
    """Llama 4's list stands above its interval; Qwen's lists dense layers; ERNIE names the first and the last."""

    def experts(config: dict[str, object]) -> list[int]:
        moe = model_spec(config).moe
        assert moe is not None
        layers = [layer for layer in range(6) if moe.has_experts(layer)]
        assert [model_spec(config).layers_with_experts(0, layer) for layer in range(7)] == [
            sum(found < layer for found in layers) for layer in range(7)
        ]
        return layers

    six: dict[str, Any] = {"num_hidden_layers": 6, "num_key_value_heads": 4}
    assert experts(small_config("llama4_text", **six, interleave_moe_layer_step=2)) == [1, 3, 5]
    assert experts(small_config("llama4_text", **six, interleave_moe_layer_step=2, moe_layers=[0, 4])) == [0, 4]
    assert experts(small_config("qwen2_moe", **six, decoder_sparse_step=2, mlp_only_layers=[3])) == [1, 5]
    assert experts(small_config("ernie4_5_moe", **six, moe_layer_start_index=2, moe_layer_end_index=4)) == [2, 3, 4]
    assert experts(small_config("ernie4_5_moe", **six, moe_layer_end_index=-1)) == [1, 2, 3, 4, 5]


def test_what_the_plain_block_leaves_out_of_a_family_is_said() -> None:
    model: dict[str, object] = {"l": 1, "d": 64, "h": 4, "V": 100}
    gemma, oss = (
        estimate({"model": model | {"architecture": name} | more}).not_modelled
        for name, more in (
            ("gemma2", {}),
            ("gpt_oss", {"moe": {"num_experts": 2, "num_experts_per_token": 1, "expert_intermediate_size": 8}}),
        )
    )

    assert "the soft-capping of Gemma 2's attention scores and logits" in gemma
    assert "the activations of attention sinks" in oss


def test_a_config_that_is_no_object_is_refused() -> None:
    config: Any = [1]
    with pytest.raises(InputError, match="holds a list, not a JSON object"):
        read_hf_config(config, "config.json")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@given(st.data())
def test_no_config_ends_in_a_traceback(data: st.DataObject) -> None:
    """Whatever a key holds, the reader returns a block or raises our error."""
    name = data.draw(st.sampled_from(known_families()))
    keys = sorted({key for keys in family_files.parsed(name).read.values() for key in keys})
    config: dict[str, object] = {"model_type": name}
    for key in keys:
        config[key] = data.draw(st.just(8) | ANYTHING, label=key)
    try:
        derive_model(read_hf_config(config, "config.json"))
    except InputError as error:
        assert str(error)  # noqa: PT017 - either outcome is right, a traceback is not


def test_reading_loads_no_heavy_library() -> None:
    """Start-up stays quick: a config is read without torch, transformers or numpy."""
    code = (
        "import sys\n"
        "from memcalc.spec.families import read_hf_config\n"
        f"read_hf_config({small_config()!r}, 'config.json')\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
