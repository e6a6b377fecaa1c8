"""A run that can be reloaded with more overrides, and the overrides between two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic import BaseModel

from memcalc.errors import InputError
from memcalc.spec.loading import load
from memcalc.spec.origin import Origin
from memcalc.spec.spec import Spec

BLOCKS = ("model", "training", "parallelism", "hardware")

ROUNDS = 3  # setting a value may change defaults of other fields, which are set in the next round


class UserRun(NamedTuple):
    """A run as its user wrote it."""

    spec: Spec  # the run
    # returns the run with further overrides after its own, as --set takes them; defaults follow them. Raises
    # `InputError` if the result is invalid.
    changed: Callable[[Sequence[str]], Spec]
    implied: tuple[str, ...] = ()  # overrides that the query adds to the configuration: a written-out run needs them
    # whether the configuration is that of another program: its fields may mean something else with other values
    is_imported: bool = False

    def as_read(self, variant: Spec) -> Spec:
        """Return a variant of the run as its file is read with the variant's values.

        transformers pads the sequences of a batch but not a batch of one, so a larger batch also adds a mask.

        Raises:
            InputError: the file is invalid with these values.
        """
        if not self.is_imported or variant.blocks == self.spec.blocks:
            return variant
        return self.changed(_overrides_between(self.spec, variant))


def as_is(variant: Spec) -> Spec:
    """Return a variant of a run of memcalc's own configuration."""
    return variant


def written_out(spec: Spec) -> UserRun:
    """Return a run with all fields set."""
    blocks, origin = spec.model_dump(), Origin(limits=spec.origin.limits, others=spec.origin.others)
    return UserRun(spec, lambda words: load(blocks, words).with_origin(origin))


def overrides_to(run: UserRun, target: Spec) -> tuple[str, ...]:
    """Return the overrides from one run to another, including those that keep derived fields unchanged."""
    words = dict(word.split("=", 1) for word in run.implied)
    reached = run.spec
    for _ in range(ROUNDS):
        missing = {field: value for block in BLOCKS for field, value in _unlike(block, reached, target)}
        if not missing:
            break
        words |= missing
        try:
            reached = run.changed(joined(words))
        except InputError:
            break
    return joined(_necessary(run, words, target) if run.is_imported else words)


def _necessary(run: UserRun, words: dict[str, str], target: Spec) -> dict[str, str]:
    """Return the values without those that the file gets from the others."""
    for field in list(words) if len(words) > 1 else ():
        fewer = {name: value for name, value in words.items() if name != field}
        with suppress(InputError):
            if run.changed(joined(fewer)).blocks == target.blocks:
                words = fewer
    return words


def _overrides_between(spec: Spec, variant: Spec) -> tuple[str, ...]:
    """Return the values of all fields in which a variant differs."""
    return joined({field: value for block in BLOCKS for field, value in _unlike(block, spec, variant)})


def joined(words: dict[str, str]) -> tuple[str, ...]:
    """Return values by field as `--set` takes them."""
    return tuple(f"{field}={value}" for field, value in words.items())


def _unlike(name: str, one: Any, other: Any) -> Iterator[tuple[str, str]]:
    """Yield the fields at or below `name` that differ, with the second value."""
    field = name.rpartition(".")[2]
    first, second = getattr(one, field, None), getattr(other, field)
    if first == second:
        return
    if not isinstance(second, BaseModel):
        yield name, _text(second)
        return
    for inner in type(second).model_fields:
        yield from _unlike(f"{name}.{inner}", first, second)


def _text(value: Any) -> str:
    """Return a value as YAML on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
