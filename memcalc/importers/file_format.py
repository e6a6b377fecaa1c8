"""The effect on memory of each field of another framework's config: one table per file format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from memcalc.frameworks.draft import Draft
from memcalc.spec.limits import Limit, Overcount

Kind = Literal["mapped", "no effect", "not modelled"]


class Meaning(NamedTuple):
    """The effect of one field on memory."""

    kind: Kind
    meaning: str  # memcalc's field, or why it has no effect, or what is not modelled
    apply: Callable[[Draft, Any], None] | None = None
    limit: Callable[[Any], Limit] | None = None  # the limit of a field that is not modelled, by its value
    reads_auto: bool = False  # whether `apply` also gets "auto", which otherwise leaves the field to others

    def limits_of(self, value: Any) -> tuple[Limit, ...]:
        """Return the limit of a field with this value."""
        return () if self.limit is None else (self.limit(value),)

    def at(self, *paths: str) -> dict[str, Meaning]:
        """Return the table of several fields with this meaning: dotted paths, separated by blanks."""
        return dict.fromkeys(" ".join(paths).split(), self)


def to(path: str, values: Mapping[Any, Any] | None = None) -> Meaning:
    """Return the meaning of a field that sets memcalc's field at `path`; `values` translates, and rejects other values.

    A translation of None means the default.
    """

    def apply(draft: Draft, value: Any) -> None:
        if values is None:
            draft.values[path] = value
        else:
            draft.translate(path, value, values)

    return Meaning("mapped", path, apply)


def fact(name: str, words: str, *, reads_auto: bool = False) -> Meaning:
    """Return the meaning of a field that has its effect together with others, which `finish` reads."""

    def apply(draft: Draft, value: Any) -> None:
        draft.facts[name] = value

    return Meaning("mapped", words, apply, reads_auto=reads_auto)


def part(words: str) -> Meaning:
    """Return the meaning of a field of a block that has its effect as a whole."""
    return Meaning("mapped", words, lambda _draft, _value: None)


def nothing(why: str = "no effect on the memory of a step") -> Meaning:
    """Return the meaning of a field that has no effect on memory."""
    return Meaning("no effect", why)


def lacking(
    what: str,
    why: str = "",
    *,
    beyond: float | None = None,
    known: tuple[object, ...] = (),
    overcounts: Overcount = "nothing",
) -> Meaning:
    """Return the meaning of a field that needs uncounted memory: the estimate can be too low.

    "no", 0 and false disable it.

    Args:
        what: a short noun phrase.
        why: what is counted in its place.
        beyond: the number that is counted; a smaller one, or none, needs no more memory.
        known: values that need no more memory than is counted.
        overcounts: what is counted that the run may not need; see `Limit`.
    """

    def limit(value: Any) -> Limit:
        holds_memory = value not in known and (beyond is None or _exceeds(value, beyond))
        return Limit(what, holds_memory, overcounts=overcounts if holds_memory else "nothing")

    return Meaning("not modelled", f"{what}: {why}" if why else what, limit=limit)


def overcounted(overcounts: Overcount, what: str, why: str = "") -> Meaning:
    """Return the meaning of a field that can only reduce memory: the estimate can be too high.

    Args:
        overcounts: what is counted that the run may not need; see `Limit`.
        what: a short noun phrase.
        why: what is counted in its place.
    """
    limit = Limit(what, holds_memory=False, overcounts=overcounts)
    return Meaning("not modelled", f"{what}: {why}" if why else what, limit=lambda _value: limit)


def _compile(draft: Draft, value: Any) -> None:
    if isinstance(value, Mapping):  # of torchtune: which parts are compiled
        value = value.get("model", True)
    if str(value).lower() not in NOT_COMPILED:
        draft.values["training.compile"] = True


# A switch, or the compiler's backend; those named here do not compile kernels.
NOT_COMPILED = ("false", "no", "none", "eager", "aot_eager", "")
COMPILE = Meaning("mapped", "training.compile", _compile, reads_auto=True)  # axolotl: auto, true since torch 2.5.1
# torch.compile's modes; the others record the kernels of a step as CUDA graphs, which have memory pools of their own.
COMPILE_MODE = lacking("CUDA graphs", known=("default", "max-autotune-no-cudagraphs"))


def noted(what: str) -> Meaning:
    """Return the meaning of a field that is not modelled, together with others: `finish` records the limit."""
    return Meaning("not modelled", what)


def _exceeds(value: Any, counted: float) -> bool:
    """Return whether a value is a number above the one that is counted; YAML parses 5e8 as a string."""
    try:
        return float(value) > counted
    except (TypeError, ValueError):
        return False
    except OverflowError:  # an integer beyond all floats
        return bool(value > 0)


# What files may leave to their program: the field, and what it is.
LENGTH = ("training.sequence_length", "tokens per sequence, which the program sets")
BATCH = ("training.micro_batch_size", "sequences in one forward")
GPUS = ("parallelism.data_parallel", "the number of data-parallel GPUs")
REPLICAS = ("parallelism.data_parallel", "the number of replicas of the model")


@dataclass(frozen=True)
class FileFormat:
    """The configuration files of a framework.

    Args:
        name: its usual name.
        version: the version that has the fields of the table.
        fields: meanings by dotted path; "*" at the end or the beginning of a path matches any suffix or prefix.
        finish: function that sets fields that follow from several others, and the framework's defaults.
        expected: required memcalc fields that such files often lack: path and description.
        recognized: function that returns whether a mapping is such a file.
        framework: the program that runs it, as `training.framework`; "": the file's fields decide.
    """

    name: str
    version: str
    fields: Mapping[str, Meaning]
    finish: Callable[[Draft], None]
    recognized: Callable[[Mapping[str, Any]], bool]
    expected: tuple[tuple[str, str], ...] = ()
    framework: str = ""

    def meaning(self, path: str) -> Meaning | None:
        """Return the meaning of the field at this path; None if the table does not have it."""
        if path in self.fields:
            return self.fields[path]
        stems = [key for key in self.fields if key.endswith("*") and path.startswith(key[:-1])]
        stems = stems or [key for key in self.fields if key.startswith("*") and path.endswith(key[1:])]
        return self.fields[max(stems, key=len)] if stems else None


def place_dropout(draft: Draft, silent: float) -> None:
    """Set one rate of dropout from the two of Megatron-LM and its successors; `silent` is the rate that a file omits.

    A value that is not a number is rejected by memcalc's own rules.
    """
    rates = [draft.facts.get(name, silent) for name in ("attention_dropout", "hidden_dropout")]
    wrong = [rate for rate in rates if type(rate) not in (int, float)]
    draft.default("training.dropout", wrong[0] if wrong else max(rates))
    if not wrong and rates[0] != rates[1]:
        draft.notes.append("one rate of dropout is counted for attention and hidden states: the larger one")
