"""The model of a hub id, as the blocks of a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from memcalc.catalogue.resolution import PublishedModel
from memcalc.errors import InputError
from memcalc.spec.limits import Limit
from memcalc.spec.model_families.conversion import known_families, read_hf_config
from memcalc.spec.model_families.multimodal import language_config, vision_limit, vision_note
from memcalc.spec.towers import TOWERS, tower_parameters

# mistralai's first tokenizer has 32,000 tokens. Models with it are Mistral 7B v0.1, with a window of 4,096, or v0.2,
# without one; all later models have larger vocabularies and no window (their config.json: "sliding_window": null).
_FIRST_VOCABULARY = 32_768


_whole: ContextVar[bool] = ContextVar("whole", default=False)


@contextmanager
def vision_language_models() -> Iterator[None]:
    """Read vision-language models as a whole, for transformers to build, instead of the language model alone."""
    before = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(before)


class ModelReading(NamedTuple):
    """The content of a config.json."""

    model: dict[str, Any]  # the raw `model:` block
    notes: tuple[str, ...] = ()  # notes for the reader of a result
    limits: tuple[Limit, ...] = ()  # parts of the model that are not estimated


def read_published(published: PublishedModel) -> ModelReading:
    """Read the config of a published model.

    Raises:
        InputError: memcalc has no formulas for it, and transformers is not installed; or a key is invalid.
    """
    entry = published.entry
    notes = [f"model {published.hub_id} from {published.origin}"]
    if entry is not None and not entry.verified:
        notes.append(f"{published.hub_id}: its parameter count does not match a published one")
    if entry is not None and entry.hub_type is not None:
        notes.append(
            f"{published.hub_id} ships its own code ({entry.hub_type}), which memcalc never runs. It is read as "
            f"{published.config['model_type']}, which has the same layers"
        )
    config = dict(published.config)
    if entry is not None:
        config, window = _with_window(config)
        notes += [window] if window else []
    total = 0 if entry is None else entry.parameters
    read = read_config(config, published.hub_id, total)
    return ModelReading(read.model, (*(f"{note}." for note in notes), *read.notes), read.limits)


def read_config(config: dict[str, Any], where: str, parameters: int = 0) -> ModelReading:
    """Read a config.json; for a vision-language model its language model, except inside `vision_language_models`.

    Args:
        config: the parsed config.json.
        where: its name in errors.
        parameters: elements of the whole model; 0: unknown.

    Raises:
        InputError: as `read_hf_config`.
    """
    own = config.get("model_type") in known_families()
    language = None if own else language_config(config)
    if language is not None and _whole.get():
        from memcalc.spec.model_families.transformers_fallback import with_class

        return ModelReading(read_hf_config(_without_code(with_class(config), where), where))
    if language is None:
        return ModelReading(read_hf_config(_without_code(config, where), where))
    model = read_hf_config(language, where)
    counted = config["model_type"] in TOWERS and "transformers_config" not in model
    note = vision_note(str(config["model_type"]), counted=counted)
    if not counted:
        return ModelReading(model, (note,), (vision_limit(parameters),))
    text = json.dumps(config, sort_keys=True)
    try:
        tower_parameters(text)
    except InputError as error:
        raise error.located(where) from None
    return ModelReading(model | {"vision_config": text}, (note,))


def _with_window(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a catalogue config with the sliding window of a Mistral that lacks it, and a note on that."""
    text = config.get("text_config")
    part = text if isinstance(text, dict) else config
    if part.get("model_type") != "mistral" or "sliding_window" in part:
        return config, ""
    size = part.get("sliding_window_size")
    if size is None and part.get("vocab_size", 0) >= _FIRST_VOCABULARY:
        size = 0
    note = ""
    if size is None:  # the larger estimate of a training step: a window's mask is a tensor
        size = 4096
        note = (
            "the catalogue lacks sliding_window of this model; assuming 4,096 tokens, as in Mistral 7B v0.1. If its "
            "config.json has null, add --set sliding_window=0 (no effect on shorter sequences)"
        )
    part = {**part, "sliding_window": size or None}
    return (part if text is None else {**config, "text_config": part}), note


def _without_code(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Reject a model that only its own code describes.

    Raises:
        InputError: the model_type is unknown, and the config names code for it.
    """
    model_type = config.get("model_type")
    if "auto_map" in config and isinstance(model_type, str) and model_type not in known_families():
        from memcalc.spec.model_families.transformers_fallback import knows_family

        if not knows_family(model_type):
            raise InputError(
                f"{model_type[:60]!r} is a model with its own code (auto_map), which memcalc never runs.",
                "If its layers are those of another family, save its config.json with that model_type.",
                f"{where}: model_type",
            )
    return config
