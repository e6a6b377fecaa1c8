"""A spec as the config.json of its family: what is written is what was read."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.layout.parameters import count_parameters
from memcalc.spec.loading import load
from memcalc.spec.model import ModelSpec
from memcalc.spec.model_families.conversion import known_families, read_hf_config
from memcalc.spec.model_families.inverse import write_hf_config

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 48,
}
EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "expert_intermediate_size": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
LINEAR = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8}
MAMBA = {"num_heads": 4, "head_dim": 8, "num_groups": 2, "state_size": 8, "conv_bias": False, "chunk_size": 32}
WITH_EXPERTS = tuple(
    "deepseek_v2 deepseek_v3 ernie4_5_moe flex_olmo glm4_moe gpt_oss granitemoe llama4_text minimax_m2 mixtral olmoe "
    "phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next".split()
)
BY_DEFAULT = {("gpt2", "new"), ("gptj", "new"), ("phi", "new"), ("gpt_neox", "exact")}  # not written


def small_model(family: str, **changes: Any) -> ModelSpec:
    """A tiny model of a family, as a user may write it."""
    model = SIZES | {"architecture": family} | changes
    if family in WITH_EXPERTS:
        model["moe"] = EXPERTS
    if family in (
        "llama4_text",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "ernie4_5_moe",
        "qwen2_moe",
        "qwen3_5_moe_text",
        "qwen3_next",
    ):  # always have one shared
        model["moe"] = EXPERTS | {"shared_expert_intermediate_size": 32}
    if family in ("mixtral", "olmoe", "flex_olmo", "phimoe", "granitemoe", "gpt_oss", "minimax_m2"):
        model["intermediate_size"] = 32
    if family.startswith("deepseek"):
        model["mla"] = LATENT
    if family.startswith(("qwen3_5", "qwen3_next")):
        model["linear_attention"] = LINEAR | {"fused_projections": family == "qwen3_next"}
    if family == "gemma4_text":
        full = {"head_dim": 32, "num_key_value_heads": 2, "keys_as_values": True}
        model |= {"full_attention": full, "full_attention_interval": 2}
    if family == "nemotron_h":
        model |= {"layer_pattern": "ME*-", "mamba": MAMBA, "num_key_value_heads": 2, "head_dim": 8}
        model["moe"] = EXPERTS | {"shared_expert_intermediate_size": 24, "latent_size": 16}
    return load({"model": model, "training": training(family)}).model


def training(family: str) -> dict[str, Any]:
    """Short sequences; modules of transformers for the families of which no others are modelled."""
    own = family in ("apertus", "nemotron_h") or family.startswith(("gemma4", "qwen3_5", "qwen3_next"))
    return {"sequence_length": 16} | ({"implementation": "huggingface"} if own else {})


@pytest.mark.parametrize("family", known_families())
def test_what_is_written_reads_as_it_was(family: str) -> None:
    model = small_model(family)
    config = write_hf_config(model)

    again = load({"model": read_hf_config(config, "config.json"), "training": training(family)}).model
    assert again.model_copy(update={"architecture": family}) == model


@pytest.mark.parametrize(("gelu", "word"), [("exact", "gelu"), ("new", "gelu_new"), ("fast", "gelu_fast")])
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "gptj", "opt", "phi"])
def test_which_gelu_is_in_the_word_for_the_activation(family: str, gelu: str, word: str) -> None:
    config = write_hf_config(small_model(family, mlp="gelu", gelu=gelu))
    block = read_hf_config(config, "config.json")

    assert word in (config.get("hidden_act"), config.get("activation_function")) or (family, gelu) in BY_DEFAULT
    assert (block["mlp"], block["gelu"]) == ("gelu", gelu)


def test_another_activation_than_the_familys_is_no_new_gelu() -> None:
    model = small_model("phi", mlp="relu")

    assert (small_model("phi").gelu, model.gelu) == ("new", "exact")
    assert write_hf_config(model)["hidden_act"] == "relu"


@pytest.mark.parametrize("family", known_families())
def test_transformers_builds_as_many_parameters(family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from memcalc.step.huggingface import build_config

    eager = {"sequence_length": 16, "implementation": "huggingface", "attention": "eager"}
    spec = load({"model": small_model(family).model_dump(exclude_none=True), "training": eager})
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(build_config(spec))

    assert sum(parameter.numel() for parameter in module.parameters()) == count_parameters(spec.model)


def test_llamas_keys() -> None:
    model = small_model("llama", num_key_value_heads=2, intermediate_size=96, tie_word_embeddings=True)

    assert write_hf_config(model) == {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 101,
        "max_position_embeddings": 48,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }


def test_a_variant_of_falcon_is_found_among_the_cases() -> None:
    """Two norms side by side come with the new architecture alone, or with two of them asked for."""
    config = write_hf_config(small_model("falcon", norms_per_layer=2, num_key_value_heads=2))

    assert (config["new_decoder_architecture"], config["num_kv_heads"]) == (True, 2)


def test_groups_of_falcon_may_have_one_norm_and_a_key_head_each_may_have_two_one_after_the_other() -> None:
    """Falcon-11B's and Falcon-RW's: attention and MLP one after the other are of the old architecture alone."""
    grouped = write_hf_config(small_model("falcon", norms_per_layer=1, num_key_value_heads=2))
    old = write_hf_config(small_model("falcon", norms_per_layer=2, num_key_value_heads=4, parallel_block=False))

    assert (grouped["new_decoder_architecture"], grouped["num_ln_in_parallel_attn"]) == (True, 1)
    assert (old["new_decoder_architecture"], old["multi_query"]) == (False, False)
    with pytest.raises(InputError, match="num_key_value_heads = 2 is not a value"):
        write_hf_config(small_model("falcon", norms_per_layer=2, num_key_value_heads=2, parallel_block=False))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (SIZES, "model.architecture is missing"),
        (
            SIZES | {"architecture": "llama", "norms_per_layer": 4},
            "norms_per_layer = 4 is not a value that .* llama has",
        ),
        (SIZES | {"architecture": "gpt2", "mlp": "swiglu"}, "gpt2 has no such combination of sizes"),
    ],
)
def test_what_a_family_does_not_have_is_refused(model: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        write_hf_config(load({"model": model, "training": {"sequence_length": 16}}).model)
