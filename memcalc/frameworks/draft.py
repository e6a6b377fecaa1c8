"""A configuration being read: the file's fields, its framework's defaults, and the questions that both leave open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memcalc.frameworks.releases import RELEASES
from memcalc.spec.limits import Limit, Overcount
from memcalc.spec.optimizers import ALIASES
from memcalc.spec.programs import number

FRAMEWORK, OPTIMIZER = "training.framework", "training.optimizer"


def is_on(value: object) -> bool:
    """Return whether a switch is on, or left to the framework, which then switches it on where it can.

    These values count as true in configs of Hugging Face's libraries.
    """
    return value in (True, "true", "auto", "full")


class DeferredValue(str):
    """A value that the command line sets, as written in the file: `$2`, `$TENSOR_PARALLEL`."""

    __slots__ = ()


class OpenQuestion(NamedTuple):
    """Something that a file leaves open.

    Args:
        field: memcalc's field that answers it, such as "training.framework".
        description: the open question, as a noun phrase.
        candidates: possible answers; the one with the largest peak is assumed, or the first of equal ones.
    """

    field: str
    description: str
    candidates: tuple[str, ...]


@dataclass
class Draft:
    """A configuration being read, as memcalc's fields.

    Args:
        directory: directory of the files that the configuration names.
        overridden: memcalc fields that the user sets, with their values.
        given_fields: the fields that the file has, with their values.
        answers: the candidates to try, by the field of their question.
        values: values of memcalc's fields by path, for example "training.micro_batch_size".
        facts: values of fields that have an effect together, by a name that the table chooses.
        notes: further notes for the user.
        elsewhere: fields that the command line sets: path, and the fields of memcalc that they decide.
        silent: memcalc fields that the file does not set and the framework's defaults decide.
        limits: features of the file that are not modelled.
        questions: the open questions so far, by field.
    """

    directory: str
    overridden: Mapping[str, Any] = field(default_factory=dict)
    given_fields: Mapping[str, Any] = field(default_factory=dict)
    answers: Mapping[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    elsewhere: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    limits: list[Limit] = field(default_factory=list)
    questions: dict[str, OpenQuestion] = field(default_factory=dict)
    unknown_model: str = ""

    def limit(
        self,
        what: str,
        why: str = "",
        *,
        holds_memory: bool,
        bytes_per_parameter: int = 0,
        sequences: int = 0,
        state_bytes_per_parameter: int = 0,
        overcounts: Overcount = "nothing",
    ) -> None:
        """Record a feature of the file that is not modelled, and add a note.

        Args:
            what: a short noun phrase for the feature.
            why: the rest of the note: what is counted instead.
            holds_memory: whether the estimate can be too low because of it.
            bytes_per_parameter: see `Limit`.
            sequences: see `Limit`.
            state_bytes_per_parameter: see `Limit`.
            overcounts: see `Limit`.
        """
        self.limits.append(
            Limit(
                what,
                holds_memory,
                bytes_per_parameter=bytes_per_parameter,
                sequences=sequences,
                state_bytes_per_parameter=state_bytes_per_parameter,
                overcounts=overcounts,
            )
        )
        self.notes.append(f"not modelled: {what}: {why}" if why else f"not modelled: {what}")

    def default(self, path: str, value: Any) -> None:
        """Set the framework's default of a field that its configuration does not set."""
        if path not in self.values:
            self.values[path] = value
            self.silent.add(path)

    def translate(self, path: str, value: Any, values: Mapping[Any, Any]) -> None:
        """Translate a value of the framework; None in the table means the default.

        Raises:
            Untranslatable: the table does not contain the value, and the user does not set the field.
        """
        key = value.lower() if isinstance(value, str) else value
        if isinstance(key, str | int | float | bool) and key in values:
            if values[key] is not None:
                self.values[path] = values[key]
        elif path not in self.overridden:
            raise Untranslatable(path, value, values)

    def given(self, path: str) -> Any:
        """Return the value of a memcalc field set by the user or the file; None if neither sets it."""
        found = self.overridden.get(path)
        return self.values.get(path) if found is None else found

    @property
    def optimizer(self) -> str:
        """The canonical name of the optimizer that the user or the file sets; PyTorch's AdamW if neither does."""
        name = str(self.given(OPTIMIZER) or "adamw")
        return ALIASES.get(name, name)

    def release_optimizer(self) -> None:
        """Remove the implementation and the paging of the file's optimizer if the user sets another one."""
        own = str(self.values.get(OPTIMIZER, "adamw"))
        pages = f"{OPTIMIZER}_options.paged"
        if OPTIMIZER not in self.overridden:
            return
        if self.optimizer != ALIASES.get(own, own) or pages in self.overridden:
            self.values.pop(f"{OPTIMIZER}_implementation", None)
        self.values.pop(pages, None)

    def choose(self, path: str, what: str, candidates: tuple[str, ...]) -> str:
        """Return the value of a field that selects the program; if nothing sets it, record an assumption."""
        settled = self.given(path)
        if settled is not None:
            return str(settled)
        self.questions.setdefault(path, OpenQuestion(path, what, candidates))
        return self.answers.get(path, candidates[0])

    def has(self, package: str, release: str) -> bool:
        """Return whether the run has this version of a package (one of its `changes`) or a later one."""
        path, known = f"training.versions.{package}", RELEASES[package]
        assert release in known.changes, release
        taken = self.choose(path, f"the version of {known.name}", known.candidates)
        self.default(path, taken)
        return number(taken) >= number(release)


class Untranslatable(ValueError):
    """A value that is not in the table."""

    def __init__(self, path: str, value: Any, values: Mapping[Any, Any]) -> None:
        super().__init__(path)
        self.path = path
        self.value = value
        self.known = ", ".join(sorted({str(each).lower() if isinstance(each, bool) else str(each) for each in values}))
