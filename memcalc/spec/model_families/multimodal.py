"""The language model of a vision-language model, if its layers are those of a family with formulas.

Its config.json has the language model under `text_config`, as in transformers 5, or at the top level (Qwen2-VL,
earlier). A vision tower of `TOWERS` is counted, but not its activations; of other
towers nothing is: a `Limit` that needs memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.spec.limits import Limit

# The family of the language model's layers, by the model_type of the whole model (transformers 5.23, modeling_*.py).
# For other models it is the model_type under text_config.
LANGUAGE_FAMILIES: dict[str, str] = {
    "gemma3": "gemma3_text",
    "glm4v": "glm4",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}


def language_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config of the language model in a vision-language model's config.json.

    None: it is not such a model, or the family of its language model is not stated.
    """
    whole, text = config.get("model_type"), config.get("text_config")
    family = LANGUAGE_FAMILIES.get(whole) if isinstance(whole, str) else None
    if not isinstance(text, dict) or not text:
        if family is None:
            return None
        text = {key: value for key, value in config.items() if not isinstance(value, dict)}
    found = dict(text)
    found["model_type"] = family or text.get("model_type")
    if not isinstance(found["model_type"], str):
        return None
    for key in ("tie_word_embeddings", "torch_dtype", "dtype"):
        if config.get(key) is not None:
            found.setdefault(key, config[key])
    return found


def vision_limit(parameters: int = 0) -> Limit:
    """Return the limit of a run of a vision-language model, if the tower is not counted.

    Args:
        parameters: elements of the whole model, including the language model; 0: unknown.
    """
    return Limit("the vision tower and its projector", holds_memory=True, parameters_of_whole=parameters)


def vision_note(model_type: str, *, counted: bool) -> str:
    """Return the note on the part of a vision-language model that is estimated.

    Args:
        model_type: of the whole model.
        counted: whether its vision tower is counted.
    """
    if counted:
        return (
            f"{model_type} is a vision-language model: its vision tower is counted (vision_tower: trained or frozen), "
            f"and its language model, with {_TEXT}."
        )
    return (
        f"{model_type} is a vision-language model: its language model is estimated, with {_TEXT}. "
        "The vision tower and its projector are not modelled."
    )


_TEXT = "image tokens as tokens of the sequence"
