"""Read a mapping with a framework's table: fields mapped, without a memory effect, not modelled, unknown, missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from memcalc.errors import InputError
from memcalc.frameworks.draft import FRAMEWORK, DeferredValue, Draft, OpenQuestion, Untranslatable
from memcalc.importers.file_format import FileFormat, Meaning
from memcalc.spec.defaults import DEFAULT_SEQUENCE_LENGTH
from memcalc.spec.limits import Limit
from memcalc.spec.origin import Assumption, Origin
from memcalc.spec.programs import program_name
from memcalc.units import whole_number

if TYPE_CHECKING:
    from memcalc.importers.launch.document import Launch

_REFERENCE = re.compile(r"\$\{(\.?)([\w.]{1,200})\}")  # of OmegaConf
_PRODUCT = re.compile(r"\$\{multiply:\s*([^,{}]{1,20}|\$\{[\w.]{1,200}\})\s*,\s*([^,{}]{1,20}|\$\{[\w.]{1,200}\})\s*\}")
_OFF = (False, 0, "", "no", "none", "null", "false", "off", "disabled", "cpu_none")
_TAKEN = {"training.sequence_length": f"assuming at most {DEFAULT_SEQUENCE_LENGTH:,}"}


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """Another framework's configuration as memcalc blocks.

    Args:
        framework: the framework of the file.
        blocks: memcalc's blocks, by name.
        mapped: field of the file, its value, and memcalc's field.
        no_effect: fields with no effect on memory, each with the reason.
        not_modelled: fields that change memory in a way that is not modelled, each with the reason.
        unknown: fields that the table does not know.
        missing: required memcalc fields that the file does not set: path and description.
        notes: further notes for the user.
        elsewhere: fields that the command line sets: path, and memcalc's fields.
        limits: features that are not modelled, for the verdict.
        name: name of the run, if it is not the file's.
        program: the program of the run, with its version, if no file names it.
        questions: what the file leaves open.
        assumptions: assumed answers to these questions that change the peak.
        unknown_model: name of the file's model, if memcalc does not know it.
        others: the configurations with other answers, the largest of each candidate that is not assumed.
    """

    framework: FileFormat
    blocks: dict[str, Any]
    mapped: tuple[tuple[str, Any, str], ...]
    no_effect: tuple[tuple[str, str], ...]
    not_modelled: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    elsewhere: tuple[tuple[str, tuple[str, ...]], ...] = ()
    limits: tuple[Limit, ...] = ()
    name: str = ""
    program: str = ""
    questions: tuple[OpenQuestion, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    unknown_model: str = ""
    others: tuple[ImportedConfig, ...] = ()

    def origin(self) -> Origin:
        """The origin of a run that is loaded from this file."""
        training = self.blocks.get("training", {})
        named = program_name(str(training.get("framework")), training.get("versions", {}))
        return Origin(self.program or named, self.sentences(), self.limits, self.assumptions)

    def fields_of(self, path: str) -> tuple[str, ...]:
        """Return the fields of the file that set memcalc's field at this path."""
        return _fields_of(path, self.mapped)

    def sentences(self) -> tuple[str, ...]:
        """Sentences about all fields, for the notes of a result."""
        if self.name:  # of a hub id: there is no file with fields to list
            return self.notes
        summary = (
            f"read as a configuration of {self.framework.name} (fields of {self.framework.version}): "
            f"{len(self.mapped)} mapped, {len(self.no_effect)} ignored (no effect on memory), "
            f"{len(self.not_modelled)} not modelled, {len(self.unknown)} unknown."
        )
        found = [summary, *self.notes]
        found += [f"not modelled: {path}: {why}." for path, why in self.not_modelled]
        if self.unknown:
            found.append(f"unknown, so not counted: {', '.join(self.unknown)}.")
        if self.no_effect:
            found.append(f"no effect on memory: {', '.join(path for path, _ in self.no_effect)}.")
        for path, what in self.missing:
            taken = _TAKEN.get(path, "assuming 1")
            found.append(f"missing: {what}; {taken}. Change it with --set {path.rpartition('.')[2]}=.")
        return tuple(found)


def read(
    framework: FileFormat,
    data: Mapping[str, Any],
    folder: str,
    overridden: Mapping[str, Any],
    answers: Mapping[str, str] | None = None,
    launch: Launch | None = None,
) -> ImportedConfig:
    """Return another framework's config as memcalc blocks.

    Args:
        framework: the framework, with its table of fields.
        data: the parsed file.
        folder: the file's directory.
        overridden: memcalc fields that the user sets, with their values; untranslatable values of the file for these
            fields are ignored.
        answers: answers to open questions, by field; other questions get their first candidate.
        launch: the command that starts the program, if a script has it.

    Raises:
        InputError: a value that matters cannot be translated.
    """
    leaves = list(_leaves(framework, data))
    given = {path: _resolved(raw, data, path) for path, raw in leaves}
    draft = Draft(folder, overridden, given, answers or {})
    _note_launch(draft, launch)
    mapped: list[tuple[str, Any, str]] = []
    no_effect: list[tuple[str, str]] = []
    not_modelled: list[tuple[str, str]] = []
    unknown: list[str] = []
    open_fields: set[str] = set()
    for path, value in given.items():
        meaning = framework.meaning(path)
        if meaning is None:
            unknown.append(path)
        elif meaning.kind == "no effect":
            no_effect.append((path, meaning.meaning))
        elif isinstance(value, DeferredValue) and meaning.kind == "mapped":
            asked = _asked(meaning, overridden)
            open_fields |= {field for field in meaning.meaning.split(", ") if field.startswith("model.")}
            if asked:
                draft.elsewhere.append((path, asked))
                draft.notes.append(f"{path} = {value} is set elsewhere; repeat the value with {_settings(asked)}")
            else:
                mapped.append((path, value, meaning.meaning))
                draft.unknown_model = str(value) if meaning.meaning == "model" else draft.unknown_model
        elif isinstance(value, DeferredValue) or (isinstance(value, str) and value.startswith("$")):
            draft.notes.append(f"{path} = {value} is set elsewhere")
        elif meaning.kind == "not modelled":
            off = (value.lower() if isinstance(value, str) else value) in _OFF if not isinstance(value, list) else False
            (no_effect if off else not_modelled).append((path, meaning.meaning))
            draft.limits += () if off else meaning.limits_of(value)
        elif value == "auto" and meaning.apply is not None and not meaning.reads_auto:
            draft.notes.append(f"{path} is auto: derived from other fields")
        else:
            with _refusing(framework, path):
                meaning.apply(draft, value)  # type: ignore[misc]  # mapped fields have one
            if not isinstance(value, Mapping):  # a block's own fields come after it
                mapped.append((path, value, meaning.meaning))
    _place_ranks(draft, launch)
    _finish(framework, draft, open_fields, mapped)
    missing = [(path, what) for path, what in framework.expected if not _is_settled(draft, path)]
    return ImportedConfig(
        framework,
        _blocks(draft.values),
        tuple(mapped),
        tuple(no_effect),
        tuple(not_modelled),
        tuple(unknown),
        tuple(missing),
        tuple(draft.notes),
        tuple(draft.elsewhere),
        unique_limits(draft.limits),
        questions=tuple(draft.questions.values()),
        unknown_model=draft.unknown_model,
    )


def _note_launch(draft: Draft, launch: Launch | None) -> None:
    """Record what a script's command says besides the options of its program."""
    if launch is not None:
        draft.overridden = {**launch.fields, **draft.overridden}
        draft.notes += launch.notes
        draft.limits += launch.limits
        draft.facts["program"] = launch.program


def _place_ranks(draft: Draft, launch: Launch | None) -> None:
    """Set the number of data-parallel ranks from the launcher's number of processes, as if the user had set it."""
    path = "parallelism.data_parallel"
    if launch is None or launch.gpus is None or path in draft.overridden:
        return
    if isinstance(launch.gpus, DeferredValue):
        draft.elsewhere.append((launch.gpus, (path,)))
        draft.notes.append(f"{launch.gpus} is set elsewhere; repeat the number of GPUs with {_settings((path,))}")
        return
    degrees = [draft.given(f"parallelism.{kind}_parallel") or 1 for kind in ("tensor", "pipeline", "context")]
    others = prod(degrees) if all(type(degree) is int and degree > 0 for degree in degrees) else 1
    draft.values[path] = max(launch.gpus // others, 1)
    draft.overridden = {**draft.overridden, path: draft.values[path]}


def _finish(framework: FileFormat, draft: Draft, open_fields: set[str], mapped: Sequence[tuple[str, Any, str]]) -> None:
    """Set the fields that follow from several others, except model fields that the user sets."""
    placed = frozenset(draft.values)
    if framework.framework:
        draft.default(FRAMEWORK, framework.framework)
    with _refusing(framework, mapped=mapped):
        framework.finish(draft)
    for path in (open_fields - placed) | _of_the_model(draft):
        draft.values.pop(path, None)
    draft.release_optimizer()


def unique_limits(limits: Iterable[Limit]) -> tuple[Limit, ...]:
    """Return each limit once: of several fields with the same limit, the one with the most memory."""
    found: dict[str, Limit] = {}
    for limit in limits:
        known = found.get(limit.feature)
        if known is None or limit[1:] > known[1:]:
            found[limit.feature] = limit
    return tuple(found.values())


def _fields_of(path: str, mapped: Iterable[tuple[str, Any, str]]) -> tuple[str, ...]:
    return tuple(field for field, _, meaning in mapped if path in meaning.split(", "))


def _is_settled(draft: Draft, path: str) -> bool:
    """Return whether a field is set, or follows from others: a global batch and accumulation set the micro-batch."""
    batch = ("training.global_batch_size", "training.gradient_accumulation_steps")
    follows = path == "training.micro_batch_size" and all(each in draft.values for each in batch)
    return path in draft.values or path in draft.overridden or follows


def _of_the_model(draft: Draft) -> frozenset[str]:
    """Return the framework's defaults of model fields, which do not apply if the user names a model."""
    named = bool(draft.overridden.keys() & {"preset", "hf_config"})
    return frozenset(path for path in draft.silent if named and path.startswith("model."))


def _asked(meaning: Meaning, overridden: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the memcalc fields that a field sets, without those that the user sets."""
    named = bool(overridden.keys() & {"preset", "hf_config"})
    fields = (path for path in meaning.meaning.split(", ") if "." in path)
    return tuple(path for path in fields if path not in overridden and not (named and path.startswith("model.")))


def _settings(paths: Iterable[str]) -> str:
    return " ".join(f"--set {path}=" for path in paths)


@contextmanager
def _refusing(framework: FileFormat, path: str = "", mapped: Iterable[tuple[str, Any, str]] = ()) -> Iterator[None]:
    """Raise an `InputError` for a value that cannot be translated.

    Args:
        framework: the framework of the file.
        path: the field of the file that has the value; "": one of `mapped`.
        mapped: fields of the file, their values, and memcalc's fields.
    """
    try:
        yield
    except Untranslatable as error:
        path = path or " and ".join(_fields_of(error.path, mapped))
        raise InputError(
            f"{path or error.path.rpartition('.')[2]} = {error.value!r} is not a supported value of {framework.name}.",
            f"Choose from {error.known}, or set memcalc's own field: --set {error.path}=.",
        ) from None


def _leaves(framework: FileFormat, data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted path, after the blocks that the table maps as a whole; null is omitted."""
    for key, value in data.items():
        path = f"{prefix}{key}"
        if value is None:
            continue
        if isinstance(value, Mapping):
            whole = framework.fields.get(path)
            if whole is not None:
                yield path, value
            if whole is None or whole.kind == "mapped":
                yield from _leaves(framework, value, f"{path}.")
        else:
            yield path, value


def _resolved(value: Any, data: Mapping[str, Any], path: str) -> Any:
    """Return the value of the field that a reference names (`${model.encoder_seq_length}`, `${.hidden_size}`)."""
    product = _PRODUCT.fullmatch(value) if isinstance(value, str) else None
    if product is not None:  # a field of NeMo's launcher
        factors = [_number(_resolved(factor, data, path)) for factor in product.groups()]
        return factors[0] * factors[1] if None not in factors else value
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    names = [*path.split(".")[:-1], *match[2].split(".")] if match[1] else match[2].split(".")
    found: Any = data
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return value if found is None or isinstance(found, Mapping) else found


def _number(value: Any) -> Any:
    """Return a whole number, also from a string; None for anything else."""
    if isinstance(value, str):
        return whole_number(value.strip())
    return value if type(value) is int else None


def _blocks(values: Mapping[str, Any]) -> dict[str, Any]:
    blocks: dict[str, Any] = {}
    for path, value in values.items():
        *outer, name = path.split(".")
        block = blocks
        for part in outer:
            block = block.setdefault(part, {})
        block[name] = value
    return blocks
