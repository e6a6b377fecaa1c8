"""Which layers turn queries and keys, and which have a window."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import memcalc
from memcalc.spec.layers import windows_among
from memcalc.spec.loading import load
from memcalc.spec.model import ModelSpec
from memcalc.spec.model_families.conversion import read_hf_config
from memcalc.spec.model_families.inverse import write_hf_config

SMOLLM3: dict[str, tuple[dict[str, Any], tuple[int, tuple[int, ...]]]] = {
    "each fourth by default": ({}, (4, ())),
    "each second": ({"no_rope_layer_interval": 2}, (2, ())),
    "a list that says each fourth": ({"no_rope_layers": [1, 1, 1, 0]}, (4, ())),
    "a list": ({"no_rope_layers": [0, 1, 1, 0]}, (0, (0, 3))),
    "all turn": ({"no_rope_layers": [1, 1, 1, 1]}, (0, ())),
}


@pytest.mark.parametrize("case", SMOLLM3)
def test_a_config_lists_the_layers_without_rope(case: str) -> None:
    keys, expected = SMOLLM3[case]
    config = {"model_type": "smollm3", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    config |= {"vocab_size": 100, "num_key_value_heads": 2, "intermediate_size": 128, **keys}
    spec = load({"model": read_hf_config(config, "config.json"), "training": {"sequence_length": 8}})
    model = spec.model

    assert (model.unrotated_interval, model.unrotated_layers) == expected
    again = load({"model": read_hf_config(write_hf_config(model), "config.json"), "training": {"sequence_length": 8}})
    assert again.model == model


def test_which_layers_turn() -> None:
    turning = {
        preset: [layer for layer in range(8) if memcalc.load(preset).model.rotates(layer)]
        for preset in ("smollm3-3b", "command-r7b", "command-r", "gemma-3-1b")
    }

    assert turning["smollm3-3b"] == turning["command-r7b"] == [0, 1, 2, 4, 5, 6]
    assert turning["command-r"] == turning["gemma-3-1b"] == [*range(8)]


def test_where_there_are_no_windows_all_layers_turn() -> None:
    model = memcalc.load("command-r7b", "sliding_window=0").model

    assert model.rotates(3)


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 12])
def test_windows_among_layers_are_those_that_are_looked_at(layers: int) -> None:
    base = memcalc.load("gpt2").model
    for window, interval, named, every in product((0, 8), (0, 1, 2, 3), ((), (0,), (1, 3), (50,)), (1, 2, 3)):
        model: ModelSpec = base.model_copy(
            update={
                "num_layers": layers,
                "sliding_window": window,
                "full_attention_interval": interval,
                "full_attention_layers": named,
            }
        )
        looked_at = [model.has_window(layer) for layer in range(every - 1, layers, every)]

        assert windows_among(model, every) == (True in looked_at, False in looked_at)
