"""A grid of configurations: axes, each a field (or several fields that change together) with its values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from memcalc.errors import InputError
from memcalc.spec.fields import find_field, unknown_override

Value = object  # value of a field: a number, a string, a Boolean, None, a list of layers
Names = str | tuple[str, ...]

WHERE = "grid"


class Axis(NamedTuple):
    """Fields that change together, by their full names, with one tuple of values per step."""

    fields: tuple[str, ...]
    values: tuple[tuple[Value, ...], ...]

    @property
    def name(self) -> str:
        """The fields without their block, for a heading."""
        return ", ".join(field.rpartition(".")[2] for field in self.fields)


class Grid:
    """The Cartesian product of some axes; configurations are numbered from 0, the last axis changing fastest.

    Args:
        axes: the values of each field, by its full name, its short name, or its symbol. A tuple of names with a tuple
            of values for each step is one axis: fields that change together, such as {("tensor_parallel",
            "data_parallel"): [(1, 8), (2, 4), (8, 1)]}.

    Raises:
        InputError: an unknown field, a field on two axes, or an axis without values.
    """

    def __init__(self, axes: Mapping[Any, Iterable[Value]]) -> None:
        self.axes = tuple(_axis(names, values) for names, values in axes.items())
        self.fields = tuple(field for axis in self.axes for field in axis.fields)
        for field in self.fields:
            if self.fields.count(field) > 1:
                raise InputError(f"{field} is varied twice.", "Give each field one list of values.", WHERE)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of values of each axis."""
        return tuple(len(axis.values) for axis in self.axes)

    @property
    def size(self) -> int:
        """Number of configurations."""
        return prod(self.shape)

    def point(self, number: int) -> dict[str, Value]:
        """Return the values of one configuration by the full names of their fields."""
        found: list[tuple[str, Value]] = []
        for axis in reversed(self.axes):
            number, step = divmod(number, len(axis.values))
            found += reversed(list(zip(axis.fields, axis.values[step], strict=True)))
        return dict(reversed(found))


def assignments(values: Mapping[str, Value]) -> tuple[str, ...]:
    """Return values in the syntax of `--set`: "training.micro_batch_size=4"."""
    return tuple(f"{field}={written(value)}" for field, value in values.items())


def written(value: Value) -> str:
    """Return a value in YAML syntax."""
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
        raise InputError("the list of values is empty.", "Add at least one value.", ", ".join(fields))
    for step in steps:
        if len(step) != len(fields):
            raise InputError(
                f"{written(step)} does not have a value for each of {', '.join(fields)}.",
                "Write as many values as names.",
                WHERE,
            )
    return Axis(fields, steps)


def _field(name: str) -> str:
    path = find_field(name)
    if path is None:
        raise unknown_override(name, WHERE)
    return ".".join(map(str, path))
