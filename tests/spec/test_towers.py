"""Vision towers and their projectors: parameters as transformers builds them, frozen in a run."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest

import memcalc
from memcalc.catalogue.shipped import CatalogueEntry, shipped_entries
from memcalc.errors import InputError
from memcalc.layout.peft_parameters import trainable_parameters
from memcalc.ledger.component import Component
from memcalc.spec.published import read_config
from memcalc.spec.towers import TOWERS, tower_parameters


def elements(config: dict[str, Any]) -> int:
    return sum(row.layers * prod(row.shape) for row in tower_parameters(json.dumps(config)))


def smallest() -> list[CatalogueEntry]:
    """The smallest published model with each tower."""
    found: dict[str, CatalogueEntry] = {}
    for entry in shipped_entries():
        kind = entry.config["model_type"]
        if entry.config.get("audio_config") is not None:  # towers with audio are traced
            continue
        if kind in TOWERS and (kind not in found or entry.parameters < found[kind].parameters):
            found[kind] = entry
    return list(found.values())


def test_every_tower_has_a_published_model() -> None:
    assert {entry.config["model_type"] for entry in smallest()} == set(TOWERS)


@pytest.mark.parametrize("entry", smallest(), ids=lambda entry: entry.config["model_type"])
def test_a_tower_has_the_parameters_of_transformers(entry: CatalogueEntry) -> None:
    """All of the model but its language model, which has one layer here."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = json.loads(json.dumps(entry.config))
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    text["num_hidden_layers"] = 1
    text.pop("layer_types", None)
    rest = dict(config)
    with torch.device("meta"):
        built = transformers.AutoConfig.for_model(rest.pop("model_type"), **rest)
        module = transformers.AutoModelForImageTextToText.from_config(built)
    theirs = sum(
        each.numel()
        for name, each in module.named_parameters()
        if "language_model." not in name and not name.startswith("lm_head.")
    )

    assert elements(entry.config) == theirs


def test_qwen3_vl_by_hand() -> None:
    """Patches of 3·2·4·4 = 96 values; 9 positions; layers of width 8 and 16; squares of 2·2 patches into 10 features.

    Patches 8·96 + 8; positions 9·8; a layer 2·(8 + 8) + (24·8 + 24) + (8·8 + 8) + (16·8 + 16) + (8·16 + 8);
    the merger (8 + 8) + (32·32 + 32) + (10·32 + 10), and after one layer another with a norm of 32 features.
    """
    vision = {
        "depth": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "patch_size": 4,
        "num_position_embeddings": 9,
        "out_hidden_size": 10,
        "deepstack_visual_indexes": [0],
    }
    layer = 2 * (8 + 8) + (24 * 8 + 24) + (8 * 8 + 8) + (16 * 8 + 16) + (8 * 16 + 8)
    merger = (32 * 32 + 32) + (10 * 32 + 10)

    assert elements({"model_type": "qwen3_vl", "vision_config": vision}) == (
        (8 * 96 + 8) + 9 * 8 + 2 * layer + (8 + 8 + merger) + (32 + 32 + merger)
    )


def test_a_tower_is_frozen_and_on_every_gpu() -> None:
    """Qwen3-VL-2B: weights of the tower in bf16 beside the language model's; no gradients, no optimizer states."""
    whole = memcalc.estimate("Qwen/Qwen3-VL-2B-Instruct", "sequence_length=256", "vision_tower=frozen")
    language = whole.spec.model.model_copy(update={"vision_config": None})
    alone = memcalc.estimate(whole.spec.model_copy(update={"model": language}))
    tower = sum(row.layers * prod(row.shape) for row in tower_parameters(whole.spec.model.vision_config or ""))

    def held(result: Any, component: Component) -> int:
        return int(result.ledger.components("optimizer_step_2").get(component, 0))

    assert held(whole, Component.WEIGHTS) - held(alone, Component.WEIGHTS) == 2 * tower
    for component in (Component.GRADIENTS, Component.OPTIMIZER_STATE, Component.MASTER_WEIGHTS):
        assert held(whole, component) == held(alone, component)
    assert trainable_parameters(whole.spec) == trainable_parameters(alone.spec)


def test_a_tower_that_trains_has_gradients_and_states_but_its_activations_are_missing() -> None:
    """bf16 gradients, and AdamW's two moments in bf16: 2 and 4 bytes for each parameter of the tower."""
    found = {
        tower: memcalc.estimate("Qwen/Qwen3-VL-2B-Instruct", "sequence_length=256", f"vision_tower={tower}")
        for tower in ("trained", "frozen")
    }
    parts = {tower: result.ledger.components("optimizer_step_2") for tower, result in found.items()}
    size = sum(row.layers * prod(row.shape) for row in tower_parameters(found["frozen"].spec.model.vision_config or ""))

    for component, width in ((Component.GRADIENTS, 2), (Component.OPTIMIZER_STATE, 4), (Component.WEIGHTS, 0)):
        assert parts["trained"][component] - parts["frozen"][component] == pytest.approx(width * size, rel=1e-4)
    held = {tower: [limit.feature for limit in result.limits if limit.holds_memory] for tower, result in found.items()}
    assert held == {"trained": ["activations of the vision tower and its projector"], "frozen": []}


def test_adapters_are_beside_the_language_model_alone_and_4_bits_hold_both() -> None:
    """QLoRA: bitsandbytes replaces the tower's linear layers too; its tables, norms and biases stay in bf16."""
    result = memcalc.estimate("google/gemma-3-4b-it", "finetune=qlora", "sequence_length=256")
    rows = [row for row in result.ledger.rows if row.module.startswith("vision.") and "model" in row.phases]
    packed = {row.module for row in rows if row.tensor == "weight, 4-bit"}

    assert "vision.layers.*.attention.q_proj" in packed
    assert "vision.projector.mm_input_projection_weight" not in packed
    assert not any("lora" in row.module for row in rows)


def test_a_size_of_a_tower_that_is_no_size_is_one_message() -> None:
    config = {
        "model_type": "qwen3_vl",
        "text_config": {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "vocab_size": 8,
        },
        "vision_config": {"depth": "many"},
    }

    with pytest.raises(InputError, match=r"config\.json: vision_config\.depth: 'many' is not a whole number"):
        read_config(config, "config.json")
