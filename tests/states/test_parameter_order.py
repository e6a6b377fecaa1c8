"""The order in which modules get their parameters, as their constructors do."""

from __future__ import annotations

from itertools import groupby

import pytest

import memcalc
from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.parameters import layer_prefixes
from memcalc.layout.stages import stages_of
from memcalc.states.optimizers.parameter_order import in_order


def names(model: str, *words: str) -> list[str]:
    """Names of modules in order, each once for each of its layers."""
    spec = memcalc.load(model, "implementation=huggingface", "attention=eager", *words)
    (stage,) = stages_of(spec)
    prefixes = layer_prefixes(spec.model, stage.numbers)
    found = in_order(stage_parameters(spec, stage), spec.model.architecture or "", prefixes)
    return [name for name, _ in groupby(held.module for held in found)]


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", "norm1 norm2 attention.qkv attention.proj gate_proj up_proj down_proj"),
        ("google/gemma-3-4b-it", "norm1 k_proj v_proj q_proj out_proj norm2 fc1 fc2"),  # models/siglip
        ("llava-hf/llava-1.5-7b-hf", "k_proj v_proj q_proj out_proj norm1 fc1 fc2 norm2"),  # models/clip
        ("dphn/Dolphin-Mistral-24B-Venice-Edition", "norm1 gate_proj up_proj down_proj k_proj v_proj q_proj"),
    ],
)
def test_layers_of_a_tower_follow_each_other(model: str, layer: str) -> None:
    """transformers 5.23, the constructors of the towers' layers."""
    tower = [name for name in names(model, "vision_tower=frozen") if name.startswith("vision.layers.")]
    wanted = layer.split()

    assert [name.endswith(end) for name, end in zip(tower, wanted, strict=False)] == [True] * len(wanted)
    assert tower.count(tower[0]) > 1


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen/Qwen3-Coder-Next", "conv1d norm in_proj_qkvz in_proj_ba out_proj router gate_up_proj"),
        ("TokenRhythm/NeoHorse-1-4B", "conv1d norm out_proj in_proj_qkv in_proj_z in_proj_b in_proj_a gate_proj"),
    ],
)
def test_linear_attention_is_before_the_mlp(model: str, expected: str) -> None:
    """transformers 5.23, Qwen3NextGatedDeltaNet and Qwen3_5GatedDeltaNet; the norm has few elements."""
    ends = [name.rpartition(".")[2] for name in names(model)]
    first = ends[ends.index("conv1d") :]

    assert [end for end in first if end != "norm"][:6] == [end for end in expected.split() if end != "norm"][:6]
