"""The dtype of a published model's weights."""

from __future__ import annotations

import json
from typing import Any

from memcalc.catalogue.resolution import resolve
from memcalc.errors import MemcalcError
from memcalc.files import read_text
from memcalc.frameworks.draft import Draft
from memcalc.spec.reading import names_hub_id

_IN_32_BITS = ("gpt2", "gpt_neo", "gptj")  # families published in float32
_PRESETS_IN_32_BITS = ("gpt2", "gpt-neo-", "gpt-j-")


def published_dtype(draft: Draft, half: str | None) -> str:
    """Return the dtype of a model's published weights, which is the default of a program without a dtype.

    A config.json sets it. For a model that is only named, the step's dtype is assumed, with a note.
    """
    config = placed_config(draft)
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        dtype = part.get("dtype", part.get("torch_dtype"))
        if isinstance(dtype, str):
            return dtype
    if config.get("model_type") in _IN_32_BITS or str(draft.values.get("preset")).startswith(_PRESETS_IN_32_BITS):
        return "float32"
    taken = "float16" if half == "fp16" else "bfloat16"
    if "training.recipe" not in draft.overridden:
        draft.notes.append(
            f"weights are loaded in the checkpoint's dtype (transformers 5), assumed to be {taken}; if it is float32, "
            f"--set recipe={'amp' if half else 'fp32 --set dtype=fp32'}"
        )
    return taken


def placed_config(draft: Draft) -> dict[str, Any]:
    """Return the config.json of the draft's model, from a file or a hub id; empty if unreadable, or a preset."""
    named = draft.values.get("hf_config")
    if not isinstance(named, str):
        return {}
    try:
        found = resolve(named).config if names_hub_id(named) else json.loads(read_text(named))
    except (MemcalcError, ValueError, RecursionError):  # the loader reports the reason
        return {}
    return found if isinstance(found, dict) else {}
