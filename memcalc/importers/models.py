"""The model that a name refers to: a config.json next to the configuration, a hub id, or a preset."""

from __future__ import annotations

import re
from pathlib import Path

from memcalc.catalogue.resolution import PublishedModel, resolve_offline
from memcalc.errors import InputError
from memcalc.files import is_file
from memcalc.frameworks.draft import Draft
from memcalc.importers.file_format import Meaning
from memcalc.spec.presets import preset_names
from memcalc.spec.reading import names_hub_id

# Prefixes and suffixes that publishers add to a model's name.
_BEFORE = re.compile(r"^(?:meta-|open-|unsloth-)+")
_AFTER = re.compile(
    r"(?:-(?:instruct|chat|base|hf|it|fp16|bf16|4bit|bnb|unsloth|dpo|sft|rl|preview|turbo|v\d+(?:\.\d+)*|\d{4}))+$"
)
_SIZES = {f"model.{name}" for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")}
_SAME = {"llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b", "llama-3.3-70b": "llama-3-70b"}  # of their sizes


def named_model(folder: str = "") -> Meaning:
    """Return the meaning of a field that names a model, by its hub id or below a directory such as "checkpoints/"."""

    def apply(draft: Draft, value: object) -> None:
        if isinstance(value, str):
            draft.facts["model"] = value.removeprefix(folder)

    return Meaning("mapped", "model", apply)


def place_model(draft: Draft) -> None:
    """Set the named model as `hf_config` or `preset`; the loader reports missing ones.

    Order of precedence: a directory, a hub id that is known offline, a preset of the same name, the hub.
    """
    name = draft.facts.get("model")
    if not isinstance(name, str):
        return
    for folder in (Path(draft.directory) / name, Path(name)):
        try:
            if is_file(folder / "config.json"):
                draft.values["hf_config"] = str((folder / "config.json").resolve())
                return
        except (OSError, ValueError):
            break
    if draft.overridden.keys() & {"preset", "hf_config"}:
        return
    known = _offline(name)
    if known is not None:
        draft.values["hf_config"] = known.hub_id
        return
    preset = preset_of(name)
    if preset is not None:
        draft.values["preset"] = preset
        draft.notes.append(f"using the preset {preset} for the model {name}")
    elif not names_hub_id(name):
        draft.unknown_model = name
    elif not draft.overridden.keys() >= _SIZES:
        draft.values["hf_config"] = name


def _offline(name: str) -> PublishedModel | None:
    try:
        return resolve_offline(name)
    except InputError:  # a damaged file of the local hub cache: it is downloaded again, or the loader reports it
        return None


def preset_of(name: str) -> str | None:
    """Return the preset, such as llama-3-8b for "meta-llama/Meta-Llama-3-8B-Instruct"; None if there is none."""
    bare = name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()
    bare = re.sub(r"(\d)_(\d)", r"\1.\2", bare).replace("_", "-")
    if bare in preset_names():
        return bare
    bare = _AFTER.sub("", _BEFORE.sub("", bare))
    bare = re.sub(r"^llama(\d)", r"llama-\1", bare)
    bare = _SAME.get(bare, bare)
    return bare if bare in preset_names() else None
