"""Load the run that a source describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.spec.rule_sets.inference import of_training
from memcalc.spec.spec import Spec

if TYPE_CHECKING:
    from memcalc.suggestions.run_overrides import UserRun

DATA_PARALLEL = "parallelism.data_parallel"

Source = Spec | str | Path | Mapping[str, Any]


def load(source: Source, *overrides: str, gpu: str | None = None, **fields: Any) -> Spec:
    """Load the run that `source` describes: fill in all defaults and check all rules.

    Args:
        source: a path, a preset's name, a hub id, "-" for standard input, a mapping, or a Spec.
        overrides: "field=value", applied in this order. On a Spec, which has its derived sizes already, they
            change only the fields they name; on every other source sizes that follow from others follow.
        gpu: the GPU to check against, in place of `hardware.gpu`.
        fields: further overrides by the bare name of their field: micro_batch_size=4, lora={"rank": 16}.
    """
    from memcalc.importers.loading import load as load_spec

    return load_spec(source, (*overrides, *assignments(fields)), gpu=gpu)


def load_to_run(source: Source, *overrides: str, gpu: str | None = None, **fields: Any) -> Spec:
    """Load a run to execute: of a vision-language model all modules, not only those of the language model."""
    from memcalc.spec.published import vision_language_models

    with vision_language_models():
        return load(source, *overrides, gpu=gpu, **fields)


def assignments(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return fields and their values as "field=value", as --set takes them; those of a nested block separately.

    Raises:
        InputError: a value is no number, text, boolean, list or mapping.
    """
    import json

    from memcalc.errors import InputError

    found: list[str] = []
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found += assignments({f"{name}.{inner}": each for inner, each in value.items()})
            continue
        try:
            found.append(f"{name}={'' if value is None else json.dumps(value)}")
        except (TypeError, ValueError):
            kind = type(value).__name__
            raise InputError(f"a {kind} is not a value of a field.", "Give a number, text or list.", name) from None
    return tuple(found)


def run_of(source: Source, *overrides: str, verb: str, gpu: str | None = None, gpus: int | None = None) -> UserRun:
    """Load the training run that `source` describes, for functions that change the run.

    Args:
        source: as for `load`.
        overrides: as for `load`.
        verb: the command, for messages.
        gpu: as for `load`.
        gpus: number of GPUs, if the configuration of another framework does not set one.
    """
    from memcalc.importers.loading import import_file, opened
    from memcalc.spec.loading import load_opened
    from memcalc.spec.overrides import parse_overrides
    from memcalc.suggestions.run_overrides import UserRun

    implied = () if gpus is None else _replicas(source, overrides, gpus)
    words = (*overrides, *implied)
    is_imported = not isinstance(source, Spec | Mapping) and import_file(source, words) is not None
    known = None if is_imported else opened(source, words)

    def changed(more: Sequence[str]) -> Spec:
        further = parse_overrides(more)
        gpu_spec = None if ("hardware", "gpu") in further else gpu
        if known is None:  # what the file means depends on the values that are set in addition
            return load(source, *words, *more, gpu=gpu_spec)
        return load_opened(known, parse_overrides(words) | further, gpu=gpu_spec)

    spec = changed(()) if str(source) == "-" else load(source, *words, gpu=gpu)
    return UserRun(of_training(spec, verb), changed, implied, is_imported)


def _replicas(source: Source, overrides: tuple[str, ...], gpus: int) -> tuple[str, ...]:
    """Return the override of data_parallel for this number of GPUs, which another framework's launcher would set."""
    from memcalc.errors import InputError
    from memcalc.importers.loading import import_file

    imported = None if isinstance(source, Spec | Mapping) else import_file(source, overrides)
    if imported is None or all(place != DATA_PARALLEL for place, _ in imported.missing):
        return ()
    try:  # one rank alone may be invalid, for example with states in host memory
        replicas = load(source, *overrides, f"parallelism.gpus={gpus}").parallelism.data_parallel
    except InputError:  # GPUs that the other axes do not divide; another error is raised again when the run is loaded
        replicas = 1
    return (f"{DATA_PARALLEL}={replicas}",)
