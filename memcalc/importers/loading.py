"""Loading of any configuration as a spec: a memcalc or framework config, a config.json or a hub id."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.errors import InputError, InputErrors, MemcalcError
from memcalc.files import is_file, read_text
from memcalc.spec.loading import OpenedConfig, load_opened
from memcalc.spec.loading import load as load_own
from memcalc.spec.loading import open_source as open_own
from memcalc.spec.model_families.field_types import shown
from memcalc.spec.origin import OtherCandidates
from memcalc.spec.overrides import parse_overrides
from memcalc.spec.reading import MODEL_CONFIG, STANDARD_INPUT, names_hub_id, standard_input
from memcalc.spec.rule_sets.run import check_rules
from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import MAX_CHARACTERS, YamlSource, parse_yaml
from memcalc.spec.yaml_source import Path as Place

if TYPE_CHECKING:
    from memcalc.importers.field_tables import ImportedConfig
    from memcalc.importers.launch.document import Launch

_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".args", ".txt")
_SUFFIXES = (".yaml", ".yml", ".json", ".toml", *_SCRIPTS)
_OURS = re.compile(r"""^['"]?(?:preset|hf_config|training|parallelism|hardware)['"]?[ \t]*:""", re.MULTILINE)
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")


def load(
    source: Spec | str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    gpu: str | None = None,
    check: Callable[[Spec, YamlSource], None] = check_rules,
) -> Spec:
    """Return the fully resolved spec of a configuration of any framework.

    Args:
        source: as for `memcalc.spec.loading.load`, or a file of another framework, or a Spec that was loaded before.
        overrides: `field=value` strings, as for --set.
        gpu: name of the GPU, overrides hardware.gpu.
        check: as for `memcalc.spec.loading.load`.

    Raises:
        InputError: the configuration is wrong, or lacks the model's sizes.
    """
    overrides = tuple(overrides)
    if isinstance(source, Spec):
        if not overrides and gpu is None:
            return source
        return load_own(source.model_dump(), overrides, gpu=gpu, check=check).with_origin(source.origin)
    config = None if isinstance(source, Mapping) else import_file(source, overrides)
    if config is None:
        _refuse_other_texts(source)
        spec = load_own(source, overrides, gpu=gpu, check=check)
        lists = None if isinstance(source, Mapping) else list_config_json(source)
        if lists is None:
            return spec
        return spec.with_origin(spec.origin.joined(lists.origin()))
    path = _path(source)
    changes = parse_overrides(overrides)
    read = _opened(config, overrides, path)
    try:
        spec = load_opened(read, changes, gpu=gpu, check=check)
    except InputErrors as errors:
        raise InputErrors([_in_file(error, config, path) for error in errors.errors]) from None
    except InputError as error:
        raise _in_file(error, config, path) from None
    others: dict[tuple[object, ...], Spec] = {}
    for each in read.others:
        with suppress(MemcalcError):  # valid without the GPU, but not with it
            other = load_opened(each, changes, gpu=gpu)
            others[other.blocks] = other
    others.pop(spec.blocks, None)
    return spec.with_origin(spec.origin._replace(others=OtherCandidates(spec.blocks, tuple(others.values()))))


def _in_file(error: InputError, config: ImportedConfig, path: Path) -> InputError:
    """Return an error about memcalc's own fields with its place in another program's file."""
    where = error.location.removeprefix("configuration").lstrip(": ")
    if config.name:  # of a hub id, which the error names itself
        return InputError(error.problem, error.remedy, where.removeprefix("hf_config").lstrip(": "))
    given = " and ".join(config.fields_of(where))
    place = f"{given} ({where})" if given else where
    return InputError(error.problem, error.remedy, f"{path}: {place}" if place else str(path))


def opened(source: Spec | str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> OpenedConfig:
    """Return a configuration that is parsed once and loaded with many values of the fields in `overrides`.

    Raises:
        InputError: it cannot be read, or lacks the model's sizes.
    """
    overrides = tuple(overrides)
    if isinstance(source, Spec):
        return open_own(source.model_dump())._replace(origin=source.origin)
    imported = None if isinstance(source, Mapping) else import_file(source, overrides)
    if imported is not None:
        return _opened(imported, overrides, _path(source))
    _refuse_other_texts(source)
    return open_own(source)


def _opened(config: ImportedConfig, overrides: tuple[str, ...], path: Path) -> OpenedConfig:
    given = set(parse_overrides(overrides))
    _check_elsewhere(config, path)
    _check_model(config, given, path)
    _check_ranks(config, given, path)
    name = "unnamed" if path.name == STANDARD_INPUT else config.name or path.stem
    others: list[OpenedConfig] = []
    for each in config.others:
        with suppress(MemcalcError):  # invalid candidates are not assumed
            others.append(_opened(each, overrides, path))
    return open_own({"name": name, **config.blocks})._replace(origin=config.origin(), others=tuple(others))


def import_file(source: str | Path, overrides: Iterable[str] = ()) -> ImportedConfig | None:
    """Return another framework's config or a hub id as memcalc blocks; None if it is neither.

    Open questions get the answers with the largest peak (`importers.assumptions`).

    Raises:
        InputError: a value that matters cannot be translated, or the hub id is unknown.
        Unavailable: the model is gated, or the hub cannot be reached.
    """
    overrides = tuple(overrides)
    fields = _fields(overrides)
    if names_hub_id(source):
        from memcalc.importers.hub import trainer_run

        return trainer_run(str(source), fields)
    path = _path(source)
    found = _of_standard_input() if path.name == STANDARD_INPUT else [_data(path)]
    candidates = [data for data in found if data is not None]
    if not candidates:
        return None
    from memcalc.importers.assumptions import settle
    from memcalc.importers.field_tables import read  # a table for each format: only for those who need one
    from memcalc.importers.registry import recognized

    data = next((each for each in candidates if recognized(each) is not None), candidates[0])
    file_format, launch = recognized(data), None
    try:
        if file_format is None:
            launch = _launch(path, fields)
            if launch is None or (file_format := recognized(launch.document)) is None:
                return None
            data = launch.document
        return settle(
            lambda answers: read(file_format, data, str(path.parent), fields, answers, launch),
            lambda imported: _peak(imported, overrides, path),
        )
    except InputError as error:
        raise error.located(str(path)) from None


def _launch(path: Path, fields: Mapping[str, Any]) -> Launch | None:
    """Return the training command of a script or of standard input; None if it has none."""
    if path.name != STANDARD_INPUT and path.suffix.lower() not in _SCRIPTS:
        return None
    from memcalc.importers.launch.document import launched

    text = standard_input() if path.name == STANDARD_INPUT else read_text(path)
    return launched(text, str(path.parent), fields, _data)


def _peak(config: ImportedConfig, overrides: tuple[str, ...], path: Path) -> int:
    """Return the allocated peak of a config in bytes, from formulas.

    Raises:
        MemcalcError: the config is invalid or not modelled.
    """
    from memcalc.estimation.transient import peak_bytes
    from memcalc.layout.stages import stages_that_matter

    spec = load_opened(_opened(config, overrides, path), parse_overrides(overrides))
    return max(peak_bytes(spec, stage, None) for stage in stages_that_matter(spec))


def _fields(overrides: Iterable[str]) -> Mapping[str, Any]:
    """Return the fields that overrides set, by path; the total number of GPUs sets the data parallelism."""
    found = {".".join(map(str, place)): value for place, value in parse_overrides(overrides).items()}
    return {"parallelism.data_parallel": None, **found} if "parallelism.gpus" in found else found


def list_config_json(source: str | Path) -> ImportedConfig | None:
    """Return the keys of a Hugging Face config.json by type; None if the file is not a config.json."""
    path = _path(source)
    if is_file(path / MODEL_CONFIG):
        path /= MODEL_CONFIG
    if path.name != STANDARD_INPUT and (path.suffix.lower() != ".json" or not is_file(path)):
        return None
    import json

    try:
        data = json.loads(standard_input() if path.name == STANDARD_INPUT else read_text(path))
    except (InputError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        return None
    from memcalc.importers.config_json import listed

    return listed(data)


def _path(source: Spec | str | Path | Mapping[str, Any]) -> Path:
    """Return the path of a source; standard input by that name."""
    return Path(STANDARD_INPUT) if str(source) == "-" else Path(str(source))


def _data(path: Path) -> Mapping[str, Any] | None:
    """Return the file as plain data; None for a memcalc file or an invalid one, which memcalc's own loader reports."""
    text = _text(path)
    return None if text is None else _parsed(text, path.suffix.lower(), str(path))


def _of_standard_input() -> list[Mapping[str, Any] | None]:
    """Return the text of standard input parsed as each format, since its format is unknown."""
    text = standard_input()
    if _OURS.search(text):
        return []
    return [_parsed(text, suffix, STANDARD_INPUT) for suffix in (".json", ".yaml", ".toml", ".sh")]


def _text(path: Path) -> str | None:
    """Return the text of a file that may be another framework's config; None if it cannot be one."""
    if path.suffix.lower() not in _SUFFIXES or not is_file(path):
        return None
    try:
        return read_text(path)
    except InputError:  # memcalc's own loader reports the reason
        return None


def _refuse_other_texts(source: str | Path | Mapping[str, Any]) -> None:
    """Reject a script or a TOML file that is not a config, with a message for its format.

    Raises:
        InputError: it has no configuration.
    """
    path = _path(source) if isinstance(source, str | Path) else Path()
    suffix, text = path.suffix.lower(), _text(path)
    if text is None or suffix not in (".toml", *_SCRIPTS) or _OURS.search(text):
        return
    if suffix == ".toml":
        import tomllib

        try:
            tomllib.loads(text)
        except ValueError as error:
            raise InputError(f"this is not TOML: {error}.", "Check quotes and brackets there.", str(path)) from None
        raise InputError(
            "the file is not a torchtitan config: [model] or [training] is missing.",
            "Name a torchtitan config, or describe the run in YAML.",
            str(path),
        )
    raise InputError(
        "no command of the file starts a training that memcalc can read.",
        "Name a script that starts a program with the arguments of transformers' Trainer or TRL, of another framework, "
        "or of Megatron-LM. For another program's command: `memcalc dry-run --gpu GPU -- COMMAND`.",
        str(path),
    )


def _parsed(text: str, suffix: str, label: str) -> Mapping[str, Any] | None:
    """Return a text as plain data; None if it is a memcalc config, or is not of this format."""
    if len(text) > MAX_CHARACTERS or (suffix in (".yaml", ".yml") and _OURS.search(text)):
        return None
    data: Any
    try:
        if suffix in _SCRIPTS:
            from memcalc.importers.megatron.arguments import arguments_of

            data = arguments_of(text)
        elif suffix == ".toml":
            import tomllib

            data = tomllib.loads(text)
        elif suffix == ".json":
            import json

            data = json.loads(text)
        else:
            data = parse_yaml(text, label).data
    except (InputError, ValueError, RecursionError):
        return None
    if not isinstance(data, Mapping) or ("model_type" in data and "base_model" not in data):
        return None  # a Hugging Face config.json; axolotl names the model's class so, too
    return data


def _check_ranks(config: ImportedConfig, given: set[Place], path: Path) -> None:
    """Check that a sharded run sets the number of GPUs; assuming one would make the estimate many times too high."""
    stage = config.blocks.get("parallelism", {}).get("zero_stage", 0)
    if stage and any(place == "parallelism.data_parallel" for place, _ in config.missing):
        if ("parallelism", "zero_stage") in given:
            return
        raise InputError(
            f"the {config.framework.name} config uses ZeRO stage {stage} but does not set the number of GPUs.",
            "Add --set data_parallel=N.",
            str(path),
        )


def _check_elsewhere(config: ImportedConfig, path: Path) -> None:
    """Raise an error that names the fields that the command line must set; for replicas a note assumes one."""
    asked = [(field, ours) for field, ours in config.elsewhere if ours != ("parallelism.data_parallel",)]
    if not asked:
        return
    fields = ", ".join(field for field, _ in asked)
    settings = " ".join(f"--set {each}=" for each in dict.fromkeys(each for _, ours in asked for each in ours))
    raise InputError(
        f"the {config.framework.name} config leaves {fields} to the command line.",
        f"Add {settings} with your values.",
        str(path),
    )


def _check_model(config: ImportedConfig, given: set[Place], path: Path) -> None:
    """Raise an error that names missing sizes of the model."""
    blocks = config.blocks
    if blocks.keys() & {"preset", "hf_config"} or given & {("preset",), ("hf_config",)}:
        return
    model = blocks.get("model", {})
    missing = [name for name in _SIZES if name not in model and ("model", name) not in given]
    if not missing:
        return
    named = f"names the model {shown(config.unknown_model)}, which memcalc does not know"
    problem = named if config.unknown_model else "does not define the model"
    raise InputError(
        f"the {config.framework.name} config {problem} (missing {', '.join(missing)}).",
        "Add --set preset=NAME (see `memcalc models`) or --set hf_config=PATH, or set these fields.",
        str(path),
    )
