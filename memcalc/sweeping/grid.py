"""A grid of configurations: axes, each a field (or several that change together) with its values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from memcalc.errors import InputError
from memcalc.spec.fields import find_field, unknown_override

Value = object  # what a field may hold: a number, a word, a truth value, None, a list of layers
Names = str | tuple[str, ...]

WHERE = "grid"


class Axis(NamedTuple):
    """Fields that change together, by their full names, and what they take: one tuple a step."""

    fields: tuple[str, ...]
    values: tuple[tuple[Value, ...], ...]

    @property
    def name(self) -> str:
        """The bare names of the fields, for a heading."""
        return ", ".join(field.rpartition(".")[2] for field in self.fields)


class Grid:
    """The product of some axes; its points are numbered from 0, the last axis running fastest.

    Args:
        axes: the values of each field, by its full name, its bare name, or its symbol. A tuple of names with a tuple of
            values for each step is one axis: fields that change together, such as
            {("tensor_parallel", "data_parallel"): [(1, 8), (2, 4), (8, 1)]}.

    Raises:
        InputError: an unknown field, a field on two axes, an axis without values.
    """

    def __init__(self, axes: Mapping[Any, Iterable[Value]]) -> None:
        self.axes = tuple(_axis(names, values) for names, values in axes.items())
        self.fields = tuple(field for axis in self.axes for field in axis.fields)
        for field in self.fields:
            if self.fields.count(field) > 1:
                raise InputError(f"{field} is varied twice.", "Give each field one list of values.", WHERE)

    @property
    def shape(self) -> tuple[int, ...]:
        """How many values each axis has."""
        return tuple(len(axis.values) for axis in self.axes)

    @property
    def size(self) -> int:
        """How many configurations there are."""
        return prod(self.shape)

    def point(self, number: int) -> dict[str, Value]:
        """The values of one configuration by the full names of their fields."""
        found: list[tuple[str, Value]] = []
        for axis in reversed(self.axes):
            number, step = divmod(number, len(axis.values))
            found += reversed(list(zip(axis.fields, axis.values[step], strict=True)))
        return dict(reversed(found))


def assignments(values: Mapping[str, Value]) -> tuple[str, ...]:
    """Values as `--set` writes them: "training.micro_batch_size=4"."""
    return tuple(f"{field}={written(value)}" for field, value in values.items())


def written(value: Value) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return str(value)


def _axis(names: Names, values: Iterable[Value]) -> Axis:
    several = isinstance(names, tuple)
    fields = tuple(_field(name) for name in (names if isinstance(names, tuple) else (names,)))
    steps = tuple(tuple(value) if several and isinstance(value, list | tuple) else (value,) for value in values)
    if not steps:
        raise InputError("there are no values to vary it over.", "Give at least one.", ", ".join(fields))
    for step in steps:
        if len(step) != len(fields):
            raise InputError(
                f"{written(step)} does not hold a value for each of {', '.join(fields)}.",
                "Give as many values as there are names.",
                WHERE,
            )
    return Axis(fields, steps)


def _field(name: str) -> str:
    path = find_field(name)
    if path is None:
        raise unknown_override(name, WHERE)
    return ".".join(map(str, path))
