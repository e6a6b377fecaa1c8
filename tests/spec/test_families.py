"""Families are data: what keys of a config mean, and bad configs end in one clear message."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.api import estimate
from memcalc.errors import InputError
from memcalc.spec.derive import derive_model
from memcalc.spec.model import (
    ConfigBlock,
    FullAttentionSpec,
    LinearAttentionSpec,
    MambaSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
)
from memcalc.spec.model_families import field_types, files
from memcalc.spec.model_families.conversion import family_defaults, known_families, read_hf_config
from tests.spec.small import model_spec, small_config


@pytest.mark.parametrize("name", known_families())
def test_each_family_speaks_of_fields_that_exist(name: str) -> None:
    """A field that ModelSpec does not have would be refused only when a user meets it."""
    fields = set(ModelSpec.model_fields)
    nested: dict[str, type[ConfigBlock]] = {
        "moe": MoeSpec,
        "mla": MlaSpec,
        "linear_attention": LinearAttentionSpec,
        "full_attention": FullAttentionSpec,
        "mamba": MambaSpec,
    }
    fields |= {f"{name}.{field}" for name, block in nested.items() for field in block.model_fields}
    family = files.parsed(name)

    assert set(family.read) <= fields
    assert set(files.flattened(family.fixed)) <= fields
    assert set(family.translate) <= set(family.read)
    assert (
        fields
        >= field_types.BOOLEANS
        | field_types.PROBABILITIES
        | field_types.COUNTS
        | field_types.CHOICES
        | field_types.LAYERS
        | field_types.WINDOWS
    )
    assert not set(family.read) & set(files.flattened(family.fixed))
    assert all(not rules[-1].when for rules in family.rules.values())


@pytest.mark.parametrize("name", known_families())
def test_a_family_settles_everything_but_sizes(name: str) -> None:
    """`architecture: X` alone gives every flag and choice that distinguishes X, and not one size."""
    defaults = files.flattened(family_defaults(name))
    kinds = field_types.BOOLEANS | field_types.PROBABILITIES | field_types.CHOICES | field_types.WINDOWS
    fixed = set(files.flattened(files.parsed(name).fixed))

    assert set(defaults) - kinds <= fixed
    assert {"position_embedding", "normalization", "mlp", "qkv_bias", "tie_word_embeddings"} <= set(defaults)


def test_llama_defaults() -> None:
    """RMSNorm, rotary positions, SwiGLU, no biases, an untied head."""
    assert family_defaults("llama") == {
        "position_embedding": "rope",
        "normalization": "rmsnorm",
        "norms_per_layer": 2,
        "mlp": "swiglu",
        "gelu": "exact",
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
        (small_config("lama"), ["config.json: model_type", "'lama'", "Nearest: llama", "`memcalc models` lists"]),
        (small_config("../llama"), ["config.json: model_type", "'../llama'"]),
        ({"num_layers": 3}, ["model_type is missing", '"model_type": "llama"']),
        ({"model_type": 7}, ["model_type = 7", "not a string"]),
        (
            {"model_type": "llava", "text_config": {}},
            [
                'config.json: model_type: memcalc has no formulas for the model family \'llava\', and transformers 5.23.0 has no causal language model of this type. Nearest: llama, llama4_text. `memcalc models` lists the families with formulas. For another class of transformers, set "architectures": ["..."] there. For your own module: memcalc.trace(module, inputs).',
                '"architectures"',
            ],
        ),
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
        (small_config("phi", partial_rotary_factor=1.5), ["partial_rotary_factor: 1.5", "not a fraction"]),
        (small_config("phi", rope_parameters={"partial_rotary_factor": 0}), ["factor: 0", "not a fraction"]),
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
    """Flags distinguish Falcon's 7B, 40B and 11B; some of them disable others."""
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
    keys = sorted({key for keys in files.parsed(name).read.values() for key in keys})
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
        "from memcalc.spec.model_families.conversion import read_hf_config\n"
        f"read_hf_config({small_config()!r}, 'config.json')\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_misspelled_key_of_a_config_json_is_named() -> None:
    config = small_config("llama")
    config["num_hiden_layers"] = config.pop("num_hidden_layers")
    with pytest.raises(InputError, match=r"Rename 'num_hiden_layers' to num_hidden_layers\."):
        read_hf_config(config, "config.json")
