"""What follows from other sizes is filled in; what cannot be is refused in one message."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.spec.derive import derive_model

SIZES: dict[str, object] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}


def test_derived_sizes_follow_the_hidden_size() -> None:
    """As many key/value heads as heads, heads of 64 / 4 = 16, an MLP of 4 * 64 = 256, an embedding as wide as d."""
    model = derive_model(SIZES)

    assert model == SIZES | {
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rotary_dim": 16,
        "intermediate_size": 256,
        "embedding_size": 64,
    }


def test_given_values_win_over_the_family_and_the_derivation() -> None:
    model = derive_model(SIZES | {"architecture": "llama", "head_dim": 24, "intermediate_size": 96, "mlp_bias": True})

    assert (model["head_dim"], model["intermediate_size"], model["mlp_bias"]) == (24, 96, True)
    assert (model["mlp"], model["qkv_bias"]) == ("swiglu", False)


def test_a_key_without_a_value_counts_as_not_given() -> None:
    """`head_dim:` with nothing behind it is how a file shows that the default holds."""
    assert derive_model(SIZES | {"head_dim": None})["head_dim"] == 16


def test_latent_attention_gives_the_width_of_a_head() -> None:
    """128 without position + 64 rotated = 192, whatever the hidden size."""
    mla = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}

    assert derive_model(SIZES | {"mla": mla})["head_dim"] == 192
    with pytest.raises(InputError, match=r"head_dim = 64.*128 \+ 64 = 192.*Leave head_dim out"):
        derive_model(SIZES | {"mla": mla, "head_dim": 64})


def test_nested_blocks_merge_with_the_family() -> None:
    """DeepSeek-V3's router has correction biases unless the file says otherwise."""
    model = derive_model(SIZES | {"architecture": "deepseek_v3", "moe": {"num_experts": 8}})

    assert model["moe"] == {"router_correction_bias": True, "num_experts": 8}


def test_heads_that_do_not_divide_are_refused_with_a_number_that_does() -> None:
    """64 / 5 is no head; 4 is the next number below that divides 64."""
    with pytest.raises(InputError) as caught:
        derive_model(SIZES | {"num_attention_heads": 5})

    assert "num_attention_heads = 5 does not divide hidden_size = 64." in str(caught.value)
    assert "such as 4, or set head_dim" in str(caught.value)


def test_a_hidden_size_with_no_divisor_near_is_refused_at_once() -> None:
    """2^31 - 1 is prime: the search for a number of heads must end."""
    with pytest.raises(InputError, match="such as 1,"):
        derive_model(SIZES | {"hidden_size": 2**31 - 1, "num_attention_heads": 2**30})


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(InputError, match=r"model.architecture: .*'lama'\. Nearest: llama"):
        derive_model(SIZES | {"architecture": "lama"})


@pytest.mark.parametrize("bad", ["64", True, 0, -64, 64.0, [64], {"a": 1}])
@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "architecture", "moe", "mla"])
def test_values_of_a_wrong_type_are_left_for_the_model_to_judge(key: str, bad: Any) -> None:
    """ModelSpec names the key and the type; here nothing is computed from them, and nothing fails."""
    if key == "architecture" and isinstance(bad, str):
        return
    assert derive_model(SIZES | {key: bad})[key] == bad


def test_the_input_is_left_as_it_was() -> None:
    raw = SIZES | {"architecture": "mixtral", "moe": {"num_experts": 8, "first_dense_layers": None}}
    before = repr(raw)
    derive_model(raw)

    assert repr(raw) == before
