"""Which model a name on a hub means: a config.json beside the configuration, else one of our presets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from memcalc.errors import InputError
from memcalc.files import is_file, read_text
from memcalc.importers.table import Draft, Meaning
from memcalc.spec.presets import preset_names

# What publishers put around a model's own name.
_BEFORE = re.compile(r"^(?:meta-|open-|unsloth-)+")
_AFTER = re.compile(
    r"(?:-(?:instruct|chat|base|hf|it|fp16|bf16|4bit|bnb|unsloth|dpo|sft|rl|preview|turbo|v\d+(?:\.\d+)*|\d{4}))+$"
)
_IN_32_BITS = ("gpt2", "gpt-neo-", "gpt-j-")  # published in float32
_SAME = {"llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b", "llama-3.3-70b": "llama-3-70b"}  # of their sizes


def named_model() -> Meaning:
    """A field that names a model."""

    def apply(draft: Draft, value: object) -> None:
        if isinstance(value, str):
            draft.facts["model"] = value

    return Meaning("mapped", "model", apply)


def place_model(draft: Draft) -> None:
    """The model that was named, as `hf_config` or `preset`; what it cannot find is left for the loader to ask for."""
    name = draft.facts.get("model")
    if not isinstance(name, str):
        return
    for folder in (Path(draft.folder) / name, Path(name)):
        try:
            if is_file(folder / "config.json"):
                draft.values["hf_config"] = str((folder / "config.json").resolve())
                return
        except (OSError, ValueError):
            break
    preset = preset_of(name)
    if preset is not None:
        draft.values["preset"] = preset
        draft.notes.append(f"using the preset {preset} for the model {name}")


def published_dtype(draft: Draft, half: str | None) -> str:
    """The dtype that a model's weights are published in, which a program that names none loads them in.

    A config.json says it. Of a model that is only named the step's is taken, and told.
    """
    path = draft.values.get("hf_config")
    config = _config(path) if isinstance(path, str) else {}
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        dtype = part.get("dtype", part.get("torch_dtype"))
        if isinstance(dtype, str):
            return dtype
    if str(draft.values.get("preset")).startswith(_IN_32_BITS):
        return "float32"
    taken = "float16" if half == "fp16" else "bfloat16"
    if "training.recipe" not in draft.overridden:
        draft.notes.append(
            f"weights are loaded in the checkpoint's dtype (transformers 5), assumed to be {taken}; if it is float32, "
            f"--set recipe={'amp' if half else 'fp32 --set dtype=fp32'}"
        )
    return taken


def _config(path: str) -> dict[str, Any]:
    try:
        found = json.loads(read_text(path))
    except (InputError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def preset_of(name: str) -> str | None:
    """ "meta-llama/Meta-Llama-3-8B-Instruct" -> "llama-3-8b"; None if no preset has that name."""
    bare = name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()
    bare = re.sub(r"(\d)_(\d)", r"\1.\2", bare).replace("_", "-")
    if bare in preset_names():
        return bare
    bare = _AFTER.sub("", _BEFORE.sub("", bare))
    bare = re.sub(r"^llama(\d)", r"llama-\1", bare)
    bare = _SAME.get(bare, bare)
    return bare if bare in preset_names() else None
