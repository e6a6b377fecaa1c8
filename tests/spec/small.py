"""Configs of any family at sizes that are quick to build."""

from __future__ import annotations

from typing import Any

from memcalc.spec.derive import derive_model
from memcalc.spec.model import ModelSpec
from memcalc.spec.model_families.conversion import read_hf_config

SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 48,
}


def small_config(model_type: str = "llama", **changes: object) -> dict[str, object]:
    return {"model_type": model_type, **SMALL, **changes}


def model_spec(config: dict[str, object]) -> ModelSpec:
    return ModelSpec.model_validate(derive_model(read_hf_config(config, "config.json")))
