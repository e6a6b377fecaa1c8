"""From what the user names to a Spec: read, override, fill in, validate, check the rules.

file | preset | stdin | mapping -> Source -> blocks -> --set -> defaults -> Spec (Pydantic) -> rules
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from memcalc.catalogue.resolution import resolve
from memcalc.errors import InputError, InputErrors, raise_all
from memcalc.files import is_file
from memcalc.spec.cards import with_budget
from memcalc.spec.defaults import default_parallelism, default_training, split_gpus, tie_batch, without_gpus
from memcalc.spec.derive import derive_model
from memcalc.spec.fields import BLOCKS, MODEL_SOURCES, NESTED, canonical_block, describe, find_field, unknown_top_level
from memcalc.spec.foreign import DIFFUSERS, foreign_block
from memcalc.spec.inference import default_inference, forward_of
from memcalc.spec.inference_rules import LEFT_ASIDE, refuse_training_fields
from memcalc.spec.origin import Origin
from memcalc.spec.overrides import CARD, apply_overrides, parse_overrides, refuse_two_cards
from memcalc.spec.presets import presets_folder
from memcalc.spec.published import ModelReading, read_config, read_published
from memcalc.spec.reading import MODEL_CONFIG, find_config, names_hub_id, read_source
from memcalc.spec.rules import check_rules
from memcalc.spec.spec import Spec
from memcalc.spec.validation import validate
from memcalc.spec.words import BUDGET, GPUS, is_word
from memcalc.spec.yaml_source import Path as Place
from memcalc.spec.yaml_source import Source

_DATA_PARALLEL: Place = ("parallelism", "data_parallel")


def load(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    gpu: str | None = None,
    check: Callable[[Spec, Source], None] = check_rules,
) -> Spec:
    """The fully resolved spec of a configuration.

    Args:
        source: a YAML file or Hugging Face config.json, the name of a preset, "-" for standard input, or a mapping.
        overrides: `field=value` texts as --set takes them.
        gpu: the card, in place of hardware.gpu.
        check: raises if a rule is broken; a search asks the rules for many runs at once.

    Raises:
        InputError: the configuration is wrong; the message names file, line, key, value, rule and remedy.
    """
    return load_opened(open_source(source), parse_overrides(overrides), gpu=gpu, check=check)


class Opened(NamedTuple):
    """A configuration that was read once and may be loaded with many overrides.

    Args:
        blocks: its blocks under their full names; never changed.
        source: where each value stands.
        folder: what paths in it are relative to.
        origin: where it comes from, which every run loaded from it shares.
    """

    blocks: Mapping[str, Any]
    source: Source
    folder: Path
    origin: Origin = Origin()


def open_source(source: str | Path | Mapping[str, Any]) -> Opened:
    """Read a configuration.

    Raises:
        InputError: it cannot be read, or has unknown keys.
    """
    if isinstance(source, str | Path) and names_hub_id(source):
        name = str(source)
        return Opened({"name": name, "hf_config": name, "model": {}}, Source({"hf_config": name}, name), Path())
    read = Source(dict(source), "configuration") if isinstance(source, Mapping) else read_source(source)
    named = isinstance(source, str | Path) and str(source) != "-"
    blocks = _blocks(read)
    blocks.setdefault("name", _name_of(source) if named else "unnamed")
    return Opened(blocks, read, Path(str(source)).parent if named else Path())


def _name_of(source: str | Path | Mapping[str, Any]) -> str:
    """The name of a run that has none of its own: of its file without the ending, or of its directory."""
    path = Path(str(source))
    return path.resolve().name if path.is_dir() else path.stem


def load_opened(
    opened: Opened,
    changes: Mapping[Place, Any],
    *,
    gpu: str | None = None,
    check: Callable[[Spec, Source], None] = check_rules,
) -> Spec:
    """The spec of a configuration that was read, with these overrides (`parse_overrides`).

    Raises:
        InputError: as `load`.
        InputErrors: several things in it are wrong.
    """
    refuse_two_cards(gpu, changes)
    overridden = opened.source.overridden | dict.fromkeys(changes, "--set")
    changes = dict(changes)
    if gpu is not None:
        changes[CARD] = gpu
        overridden[CARD] = "--gpu"
    read = replace(opened.source, overridden=overridden)
    blocks = copy.deepcopy(dict(opened.blocks))
    if GPUS in changes and _DATA_PARALLEL not in changes:
        blocks.get("parallelism", {}).pop(_DATA_PARALLEL[-1], None)
    elif _DATA_PARALLEL in changes and GPUS not in changes:
        blocks.get("parallelism", {}).pop(GPUS[-1], None)
    named = next((changes[key,] for key in MODEL_SOURCES if changes.get((key,)) is not None), None)
    if named is not None:
        _make_way(blocks, str(named))
    apply_overrides(blocks, changes)
    blocks.setdefault("name", opened.blocks["name"])  # `--set name=` unsets it
    spec = _resolve(blocks, opened.folder, read, check)
    return spec.with_origin(opened.origin.joined(spec.origin))


def _make_way(blocks: dict[str, Any], named: str) -> None:
    """For a model that is named in place of the one that a file has: sizes of both would be neither.

    What a file adds to a model that it names itself, or says of one that it does not have whole, stays.
    """
    for key in (*MODEL_SOURCES, "_reading"):
        blocks.pop(key, None)
    if {"num_layers", "hidden_size"} <= blocks.get("model", {}).keys():
        blocks["model"] = {}
        blocks["name"] = Path(named).stem


def mapping_of(source: Source) -> dict[str, Any]:
    """What a source holds.

    Raises:
        InputError: it is no mapping, or an empty one.
    """
    data = source.data
    if not isinstance(data, dict) or not data:
        raise InputError(
            "it has no configuration." if data in (None, {}) else f"it holds {describe(data)}, not a configuration.",
            "Write at least a `model:` block; `memcalc models` lists presets to start from.",
            source.label,
        )
    return data


def _blocks(source: Source) -> dict[str, Any]:
    """The blocks of a file under their full names; a Hugging Face config.json becomes a model block."""
    data = mapping_of(source)
    if _is_config_json(data):
        return _of_config_json(_read_config_json(data, source.label))
    blocks: dict[str, Any] = {}
    for key, value in data.items():
        if key == "inference" and value is None:  # a training run, written out in full
            continue
        if key == "model" and isinstance(value, str) and "preset" not in data:  # `model: llama-3-8b` names one
            blocks["preset"] = value
        elif key in BLOCKS:
            blocks[key] = canonical_block(key, value, source)
        elif key not in ("name", *MODEL_SOURCES):
            source.faults.append(unknown_top_level(key, source.where((key,))))
            if not data.keys() & {*BLOCKS, *MODEL_SOURCES}:  # none of ours: one message of that is enough
                raise_all(source.faults)
        elif value is not None:
            blocks[key] = value
    model = blocks.setdefault("model", {})
    for key in MODEL_SOURCES:  # INTERFACE lets them stand beside or inside the model block
        if key in model and key in blocks:
            where = source.where(("model", key))
            raise InputError(f"{key} is given twice, outside and inside model.", "Keep one of the two.", where)
        if key in model:
            blocks[key] = model.pop(key)
    return blocks


def _is_config_json(data: dict[str, Any]) -> bool:
    """Whether a mapping is a config.json of transformers or diffusers: sizes of a model, and no block of ours."""
    if data.keys() & {*BLOCKS, *MODEL_SOURCES}:
        return False
    sizes = sum((find_field(key) or ("",))[0] == "model" or is_word(key, "model") for key in data)
    return bool(data.keys() & {"model_type", "architectures", DIFFUSERS}) or sizes >= _SIZES_OF_A_MODEL


def _read_config_json(data: dict[str, Any], label: str) -> ModelReading:
    """Read a config.json of transformers or diffusers.

    Raises:
        InputError: it says no model_type; or as `read_config`.
    """
    if "model_type" in data:
        return read_config(data, label)
    if DIFFUSERS in data:
        return ModelReading(foreign_block(data, label))
    raise InputError(
        "this Hugging Face config.json has no model_type, so its family is unknown.",
        'Add it, such as "model_type": "llama".',
        label,
    )


def _of_config_json(reading: ModelReading) -> dict[str, Any]:
    """The blocks that a config.json stands for; what is to be told of it comes along under `_reading`."""
    return {"model": reading.model, "_reading": reading}


def _resolve(
    blocks: dict[str, Any],
    folder: Path,
    source: Source,
    check: Callable[[Spec, Source], None],
    before: tuple[InputError, ...] = (),
) -> Spec:
    """The Spec of the blocks of a configuration.

    Where values are wrong, the rules are checked without them (`before`: what was wrong with them).

    Raises:
        InputError: something is wrong.
        InputErrors: several things are.
    """
    faults = list(source.faults)
    model = _noting(faults, lambda: _model(blocks, folder, source), None)
    known = model is not None
    if model is None:  # values of the other blocks are looked at all the same, beside a model that is right
        model = derive_model(_shipped(presets_folder() / _RIGHT)["model"])
    reading = blocks.get("_reading", ModelReading({}))
    given = _training_base(blocks) | blocks.get("training", {})
    inference: dict[str, Any] | None = None
    left_aside: dict[str, Any] = {}
    if "inference" in blocks:
        refuse_training_fields(source.overridden)
        left_aside = given
        inference = default_inference(blocks["inference"], model, source.where(("inference", "context_length")))
        given = forward_of(inference)
    parallelism = blocks.get("parallelism", {})
    parallelism = _noting(faults, lambda: split_gpus(parallelism, source.where(GPUS)), without_gpus(parallelism))
    training = default_training(given, model, parallelism)
    parallelism = default_parallelism(parallelism, training.get("implementation"), training.get("dtype"))
    tied = source.where(("training", "global_batch_size"))
    training = _noting(faults, lambda: tie_batch(training, parallelism, tied), training)
    hardware = blocks.get("hardware", {})
    raw = {
        "name": blocks.get("name", "unnamed"),
        "model": model,
        "training": training,
        "parallelism": parallelism,
        "hardware": _noting(faults, lambda: _with_budget(hardware, source), {}),
        "inference": inference,
    }
    # A field that is missing may be one whose key was wrong: one message of that is enough.
    spec, wrong = validate(raw, source, missing=not faults)
    faults += [error for _, error in wrong]
    if wrong and known and not before:
        for path, _ in wrong:
            apply_overrides(blocks, {path: None})
        return _resolve(blocks, folder, source, check, tuple(faults))
    if spec is not None and known:
        _noting(faults, partial(check, spec, source), None)
    if before:
        blocks_wrong = {_block_of(error) for error in before}
        faults = [*before, *(error for error in faults if _block_of(error) not in blocks_wrong)]
    raise_all(faults)
    assert spec is not None
    resolved_before = left_aside == spec.training.model_dump(exclude_none=True)
    aside = () if not left_aside or resolved_before else (LEFT_ASIDE,)
    return spec.with_origin(Origin(notes=(*reading.notes, *aside), limits=reading.limits))


_RIGHT = "gpt2.yaml"  # a model that is right, in place of one that is not
_SIZES_OF_A_MODEL = 3  # keys of a model outside a block from which on a file is a config.json
_T = TypeVar("_T")
_U = TypeVar("_U")


def _noting(faults: list[InputError], step: Callable[[], _T], otherwise: _U) -> _T | _U:
    """What a step of loading gives; where it fails its error is noted, and loading goes on with `otherwise`."""
    try:
        return step()
    except InputErrors as several:
        faults += several.errors
    except InputError as error:
        faults.append(error)
    return otherwise


def _model(blocks: dict[str, Any], folder: Path, source: Source) -> dict[str, Any]:
    """The whole model block: what is referred to, what the block says over it, and what follows."""
    return _derived(merged(_model_base(blocks, folder, source), blocks.get("model", {})), source)


def _block_of(error: InputError) -> str:
    """The block of the key in an error's place: "training" of "run.yaml:3: training.dtype".

    A rule of a block with a wrong value would often be a second message of one fault.
    """
    return error.where.rpartition(": ")[2].partition(".")[0]


def _with_budget(hardware: dict[str, Any], source: Source) -> dict[str, Any]:
    """The hardware block with a GPU that has as much memory as the budget; both are inputs, the GPU's name keeps both.

    Raises:
        InputError: the budget is not a size.
    """
    filled = dict(hardware)
    gpu, budget = filled.get("gpu"), filled.pop(str(BUDGET[-1]), None)
    if budget is None or not (gpu is None or isinstance(gpu, str)):  # the latter is for validation to refuse
        return filled
    try:
        return filled | {"gpu": with_budget(gpu, str(budget))}
    except InputError as error:
        raise error.located(source.where(BUDGET)) from None


def _derived(model: dict[str, Any], source: Source) -> dict[str, Any]:
    try:
        return derive_model(model)
    except InputError as error:  # it knows the key, the source knows the line
        raise InputError(error.problem, error.remedy, source.where(tuple(error.where.split(".")))) from None


def _model_base(blocks: dict[str, Any], folder: Path, source: Source) -> dict[str, Any]:
    """What `preset:` or `hf_config:` says of the model; the model block's own fields go over it."""
    given = [key for key in MODEL_SOURCES if key in blocks]
    if not given:
        return {}
    if len(given) > 1:
        raise InputError("preset and hf_config exclude each other.", "Keep one of the two.", source.where(("preset",)))
    key = given[0]
    name = blocks[key]
    where = source.where((key,))
    if not isinstance(name, str):
        raise InputError(f"{key} = {describe(name)} is not a name.", "Write a path or the name of a preset.", where)
    try:
        base = _referred(_beside(name, folder))
    except InputError as error:
        if source.label == name:  # a hub id in place of a file, which the error names itself
            raise
        raise error.located(where) from None
    blocks.setdefault("_base_training", base.get("training", {}))
    if "_reading" in base:
        blocks["_reading"] = base["_reading"]
    if any(nested in base for nested in MODEL_SOURCES):
        raise InputError(f"{name} refers to yet another configuration.", "Name that one directly.", where)
    model: dict[str, Any] = base["model"]
    return model


def _referred(path: str | Path) -> dict[str, Any]:
    """The blocks of a configuration that another one names, by path, preset or hub id."""
    if isinstance(path, str):
        return _of_config_json(read_published(resolve(path)))
    shipped = isinstance(path, Path) and path.parent == presets_folder()
    if shipped:
        return copy.deepcopy(_shipped(path))
    read = read_source(path)
    blocks = _blocks(read)
    raise_all(read.faults)
    return blocks


@cache  # a thousand configurations name the same few presets
def _shipped(path: str | Path) -> dict[str, Any]:
    return _blocks(read_source(path))


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, nested blocks field by field."""
    result = base | over
    for key in NESTED:
        if isinstance(base.get(key), dict) and isinstance(over.get(key), dict):
            result[key] = base[key] | over[key]
    return result


def _training_base(blocks: dict[str, Any]) -> dict[str, Any]:
    # Presets hold only the model, gpt3 alone its published training block: naming it as a preset brings both.
    base: dict[str, Any] = blocks.pop("_base_training", {})
    return base


def _beside(name: str, folder: Path) -> str | Path:
    """A path in a configuration is relative to that configuration's folder."""
    beside = folder / name
    if is_file(beside):
        return beside
    if is_file(beside / MODEL_CONFIG):
        return beside / MODEL_CONFIG
    return name if names_hub_id(name) else find_config(name)
