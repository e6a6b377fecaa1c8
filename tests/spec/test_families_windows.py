"""Windows of Qwen's later layers: config.json's use_sliding_window, sliding_window and max_window_layers."""

from __future__ import annotations

import pytest

from memcalc.spec.model_families.conversion import read_hf_config

CONFIG: dict[str, object] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}
ON = {"use_sliding_window": True, "sliding_window": 32}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("given", "window", "full"),
    [
        ({}, 0, []),
        ({"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2}, 0, []),
        (ON | {"max_window_layers": 3}, 32, [0, 1, 2]),
        (ON | {"max_window_layers": 0}, 32, []),
        (ON | {"layer_types": ["full_attention", "sliding_attention"] * 2}, 32, [0, 2]),
    ],
)
def test_the_layers_before_max_window_layers_attend_to_all_tokens(
    family: str, given: dict[str, object], window: int, full: list[int]
) -> None:
    model = read_hf_config({"model_type": family, **CONFIG, **given}, "config.json")

    assert (model["sliding_window"], model["full_attention_layers"]) == (window, full)
