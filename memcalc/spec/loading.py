"""Loading of a Spec: read, override, set defaults, validate, check the rules.

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
from memcalc.spec.defaults import default_parallelism, default_training, split_gpus, tie_batch, without_gpus
from memcalc.spec.derive import derive_model
from memcalc.spec.fields import BLOCKS, MODEL_SOURCES, NESTED, canonical_block, describe, find_field, unknown_top_level
from memcalc.spec.hardware.gpus import with_budget
from memcalc.spec.inference import attention_of_generation, default_inference, forward_of
from memcalc.spec.model_families.transformers_fallback import DIFFUSERS, fallback_block
from memcalc.spec.origin import Origin
from memcalc.spec.overrides import CARD, apply_overrides, parse_overrides, reject_two_gpus
from memcalc.spec.presets import presets_folder
from memcalc.spec.published import ModelReading, read_config, read_published
from memcalc.spec.reading import MODEL_CONFIG, find_config, names_hub_id, read_source
from memcalc.spec.rule_sets.inference import LEFT_ASIDE, refuse_training_fields
from memcalc.spec.rule_sets.run import check_rules
from memcalc.spec.spec import Spec
from memcalc.spec.validation import validate
from memcalc.spec.words import BUDGET, GPUS, is_foreign_name
from memcalc.spec.yaml_source import Path as Place
from memcalc.spec.yaml_source import YamlSource

_DATA_PARALLEL: Place = ("parallelism", "data_parallel")


def load(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    gpu: str | None = None,
    check: Callable[[Spec, YamlSource], None] = check_rules,
) -> Spec:
    """Return the fully resolved spec of a configuration.

    Args:
        source: a YAML file or Hugging Face config.json, the name of a preset, "-" for standard input, or a mapping.
        overrides: `field=value` strings as in --set.
        gpu: the GPU, in place of hardware.gpu.
        check: raises if a rule is violated; a search checks the rules for many runs at once.

    Raises:
        InputError: the configuration is invalid; the message has file, line, key, value, rule and remedy.
    """
    return load_opened(open_source(source), parse_overrides(overrides), gpu=gpu, check=check)


class OpenedConfig(NamedTuple):
    """A configuration that was read once and can be loaded with many overrides."""

    blocks: Mapping[str, Any]  # its blocks under their full names; never changed
    source: YamlSource  # has the line of each value
    folder: Path  # directory that paths in it are relative to
    origin: Origin = Origin()  # its origin, which all runs loaded from it share
    others: tuple[OpenedConfig, ...] = ()  # the configurations with other answers to its open choices


def open_source(source: str | Path | Mapping[str, Any]) -> OpenedConfig:
    """Read a configuration.

    Raises:
        InputError: it cannot be read, or has unknown keys.
    """
    if isinstance(source, str | Path) and names_hub_id(source):
        name = str(source)
        return OpenedConfig(
            {"name": name, "hf_config": name, "model": {}}, YamlSource({"hf_config": name}, name), Path()
        )
    read = YamlSource(dict(source), "configuration") if isinstance(source, Mapping) else read_source(source)
    named = isinstance(source, str | Path) and str(source) != "-"
    blocks = _blocks(read)
    blocks.setdefault("name", _name_of(source) if named else "unnamed")
    return OpenedConfig(blocks, read, Path(str(source)).parent if named else Path())


def _name_of(source: str | Path | Mapping[str, Any]) -> str:
    """Return the default name of a run: of its file without the suffix, or of its directory."""
    path = Path(str(source))
    return path.resolve().name if path.is_dir() else path.stem


def load_opened(
    opened: OpenedConfig,
    changes: Mapping[Place, Any],
    *,
    gpu: str | None = None,
    check: Callable[[Spec, YamlSource], None] = check_rules,
) -> Spec:
    """Return the spec of a configuration that was read, with these overrides (`parse_overrides`).

    Raises:
        InputError: as `load`.
        InputErrors: there are several errors.
    """
    reject_two_gpus(gpu, changes)
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
    """Remove a file's model if another model replaces it, because their sizes must not mix.

    Fields that a file adds to a referenced model, or an incomplete model, stay.
    """
    for key in (*MODEL_SOURCES, "_reading"):
        blocks.pop(key, None)
    if {"num_layers", "hidden_size"} <= blocks.get("model", {}).keys():
        blocks["model"] = {}
        blocks["name"] = Path(named).stem


def mapping_of(source: YamlSource) -> dict[str, Any]:
    """Return the content of a source.

    Raises:
        InputError: it is not a mapping, or is empty.
    """
    data = source.data
    if not isinstance(data, dict) or not data:
        raise InputError(
            "the file has no configuration."
            if data in (None, {})
            else f"the file holds {describe(data)}, not a configuration.",
            "Write a `model:` block, or `preset: NAME` (`memcalc models` lists the presets).",
            source.label,
        )
    return data


def _blocks(source: YamlSource) -> dict[str, Any]:
    """Return the blocks of a file under their full names; a Hugging Face config.json becomes a model block."""
    data = mapping_of(source)
    if _is_config_json(data):
        return _of_config_json(_read_config_json(data, source.label))
    blocks: dict[str, Any] = {}
    for key, value in data.items():
        if key == "inference" and value is None:  # a training run with all fields written out
            continue
        if key == "model" and isinstance(value, str) and "preset" not in data:  # `model: llama-3-8b` is a preset
            blocks["preset"] = value
        elif key in BLOCKS:
            blocks[key] = canonical_block(key, value, source)
        elif key not in ("name", *MODEL_SOURCES):
            source.faults.append(unknown_top_level(key, source.where((key,))))
            if not data.keys() & {*BLOCKS, *MODEL_SOURCES}:  # not a memcalc configuration: one error is enough
                raise_all(source.faults)
        elif value is not None:
            blocks[key] = value
    model = blocks.setdefault("model", {})
    for key in MODEL_SOURCES:  # they may be next to or inside the model block
        if key in model and key in blocks:
            where = source.where(("model", key))
            raise InputError(f"{key} is set twice, inside and outside the block model.", "Keep one of the two.", where)
        if key in model:
            blocks[key] = model.pop(key)
    return blocks


def _is_config_json(data: dict[str, Any]) -> bool:
    """Return whether a mapping is a config.json of transformers or diffusers:

    sizes of a model without memcalc's blocks.
    """
    if data.keys() & {*BLOCKS, *MODEL_SOURCES}:
        return False
    sizes = sum((find_field(key) or ("",))[0] == "model" or is_foreign_name(key, "model") for key in data)
    return bool(data.keys() & {"model_type", "architectures", DIFFUSERS}) or sizes >= _SIZES_OF_A_MODEL


def _read_config_json(data: dict[str, Any], label: str) -> ModelReading:
    """Read a config.json of transformers or diffusers.

    Raises:
        InputError: it has no model_type; or as `read_config`.
    """
    if "model_type" in data:
        return read_config(data, label)
    if DIFFUSERS in data:
        return ModelReading(fallback_block(data, label))
    raise InputError(
        "model_type is missing, so the family of this Hugging Face config.json is unknown.",
        'Add the key, e.g. "model_type": "llama".',
        label,
    )


def _of_config_json(reading: ModelReading) -> dict[str, Any]:
    """Return the blocks of a config.json; its notes and limits are under `_reading`."""
    return {"model": reading.model, "_reading": reading}


def _resolve(
    blocks: dict[str, Any],
    folder: Path,
    source: YamlSource,
    check: Callable[[Spec, YamlSource], None],
    before: tuple[InputError, ...] = (),
) -> Spec:
    """Return the Spec of the blocks of a configuration.

    If values are invalid, the rules are checked without them (`before`: the errors of these values).

    Raises:
        InputError: there is one error.
        InputErrors: there are several errors.
    """
    faults = list(source.faults)
    model = _noting(faults, lambda: _model(blocks, folder, source), None)
    known = model is not None
    if model is None:  # the other blocks are checked nevertheless, with a valid model
        model = derive_model(_shipped(presets_folder() / _RIGHT)["model"])
    reading = blocks.get("_reading", ModelReading({}))
    given = _training_base(blocks) | blocks.get("training", {})
    given = _noting(faults, partial(_with_teacher, given, folder, source), {**given, TEACHER: None})
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
    if inference is not None and inference.get("attention") is None:
        inference["attention"] = attention_of_generation(training, model)
        training["attention"] = inference["attention"]
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
    # A missing field may be one with an invalid key: one error is enough.
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


TEACHER = "teacher"
_NAMED = MODEL_SOURCES[0]  # a model that is named by a word
_RIGHT = "gpt2.yaml"  # a valid model, in place of an invalid one
_SIZES_OF_A_MODEL = 3  # least number of model fields outside a block in a config.json
_T = TypeVar("_T")
_U = TypeVar("_U")


def _noting(faults: list[InputError], step: Callable[[], _T], otherwise: _U) -> _T | _U:
    """Return the result of a step of loading; if it fails, record the error and return `otherwise`."""
    try:
        return step()
    except InputErrors as several:
        faults += several.errors
    except InputError as error:
        faults.append(error)
    return otherwise


def _model(blocks: dict[str, Any], folder: Path, source: YamlSource) -> dict[str, Any]:
    """Return the complete model block: the referenced model, the block's own fields over it, and derived defaults."""
    return _derived(merged(_model_base(blocks, folder, source), blocks.get("model", {})), source)


def _with_teacher(training: dict[str, Any], folder: Path, source: YamlSource) -> dict[str, Any]:
    """Return the training block with the complete model block of its teacher.

    Raises:
        InputError: as for the run's own model.
    """
    named = training.get(TEACHER)
    block = {_NAMED: named} if isinstance(named, str) else named
    if not isinstance(block, dict):
        return training
    origin = {key: block[key] for key in MODEL_SOURCES if key in block}
    own = {key: value for key, value in block.items() if key not in origin}
    try:
        return training | {TEACHER: _model({**origin, "model": own}, folder, source)}
    except InputError as error:
        what = f"teacher = {describe(named)}: " if isinstance(named, str) else ""
        raise InputError(what + error.problem, error.remedy, source.where(("training", TEACHER))) from None


def _block_of(error: InputError) -> str:
    """Return the block in an error's place: "training" for "run.yaml:3: training.dtype".

    A rule of a block with an invalid value would often report the same error twice.
    """
    return error.location.rpartition(": ")[2].partition(".")[0]


def _with_budget(hardware: dict[str, Any], source: YamlSource) -> dict[str, Any]:
    """Return the hardware block with the memory budget as part of the GPU's name.

    Raises:
        InputError: the budget is not a size.
    """
    filled = dict(hardware)
    gpu, budget = filled.get("gpu"), filled.pop(str(BUDGET[-1]), None)
    if budget is None or not (gpu is None or isinstance(gpu, str)):  # validation rejects other types
        return filled
    try:
        return filled | {"gpu": with_budget(gpu, str(budget))}
    except InputError as error:
        raise error.located(source.where(BUDGET)) from None


def _derived(model: dict[str, Any], source: YamlSource) -> dict[str, Any]:
    try:
        return derive_model(model)
    except InputError as error:  # the error has the key, the source has the line
        raise InputError(error.problem, error.remedy, source.where(tuple(error.location.split(".")))) from None


def _model_base(blocks: dict[str, Any], folder: Path, source: YamlSource) -> dict[str, Any]:
    """Return the model of `preset:` or `hf_config:`; the model block's own fields override it."""
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
        base = _referred(_relative_path(name, folder))
    except InputError as error:
        if source.label == name:  # a hub id in place of a file, which the error already names
            raise
        raise error.located(where) from None
    blocks.setdefault("_base_training", base.get("training", {}))
    if "_reading" in base:
        blocks["_reading"] = base["_reading"]
    if any(nested in base for nested in MODEL_SOURCES):
        raise InputError(f"{name} refers to another configuration.", "Name that configuration directly.", where)
    model: dict[str, Any] = base["model"]
    return model


def _referred(path: str | Path) -> dict[str, Any]:
    """Return the blocks of a configuration that another one refers to, by path, preset or hub id."""
    if isinstance(path, str):
        return _of_config_json(read_published(resolve(path)))
    shipped = isinstance(path, Path) and path.parent == presets_folder()
    if shipped:
        return copy.deepcopy(_shipped(path))
    read = read_source(path)
    blocks = _blocks(read)
    raise_all(read.faults)
    return blocks


@cache  # many configurations refer to few presets
def _shipped(path: str | Path) -> dict[str, Any]:
    return _blocks(read_source(path))


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `over` on top of `base`, with nested blocks merged field by field."""
    result = base | over
    for key in NESTED:
        if isinstance(base.get(key), dict) and isinstance(over.get(key), dict):
            result[key] = base[key] | over[key]
    return result


def _training_base(blocks: dict[str, Any]) -> dict[str, Any]:
    # Presets have the model only, except that gpt3 includes its published training block.
    base: dict[str, Any] = blocks.pop("_base_training", {})
    return base


def _relative_path(name: str, folder: Path) -> str | Path:
    """Return a path relative to the configuration's directory if it exists there, else a preset or hub id."""
    beside = folder / name
    if is_file(beside):
        return beside
    if is_file(beside / MODEL_CONFIG):
        return beside / MODEL_CONFIG
    return name if names_hub_id(name) else find_config(name)
