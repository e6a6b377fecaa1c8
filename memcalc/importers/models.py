"""Which model a name on a hub means: a config.json beside the configuration, else one of our presets."""

from __future__ import annotations

import re
from pathlib import Path

from memcalc.importers.table import Draft, Meaning
from memcalc.spec.presets import preset_names

# What publishers put around a model's own name.
_BEFORE = re.compile(r"^(?:meta-|open-|unsloth-)+")
_AFTER = re.compile(
    r"(?:-(?:instruct|chat|base|hf|it|fp16|bf16|4bit|bnb|unsloth|dpo|sft|rl|preview|turbo|v\d+(?:\.\d+)*|\d{4}))+$"
)
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
            if (folder / "config.json").is_file():
                draft.values["hf_config"] = str((folder / "config.json").resolve())
                return
        except (OSError, ValueError):
            break
    preset = preset_of(name)
    if preset is not None:
        draft.values["preset"] = preset
        draft.notes.append(f"the model {name} is taken to be our preset {preset}")


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
