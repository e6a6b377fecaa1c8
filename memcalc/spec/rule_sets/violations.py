"""A violation of a configuration rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import Path

NOTHING: Mapping[str, object] = {}


class Violation(NamedTuple):
    """A violated rule: the field, the rule with its numbers, and the remedy."""

    key: Path
    problem: str
    remedy: str


def only(
    spec: Spec,
    known: Mapping[str, tuple[object, ...]],
    problem: str,
    remedy: str,
    given: Mapping[str, object] = NOTHING,
) -> Iterator[Violation]:
    """Yield a violation for each field with a value that is not among the known ones.

    Args:
        spec: the run.
        known: the valid values of each field, by its dotted path.
        problem: the sentence with "{}" in place of "field = value".
        remedy: the alternative to these values, which ends "Set ..., or ".
        given: values that replace those of the spec, by path.
    """
    for path, values in known.items():
        key = tuple(path.split("."))
        value = given[path] if path in given else attrgetter(path)(spec)
        if value not in values:
            is_given = problem.format(f"{key[-1]} = {shown(value)}")
            yield Violation(key, is_given, f"Set {setting(key[-1], values)}, or {remedy}.")


def divisors(number: int) -> str:
    """Return the divisors of `number` up to 128 for a remedy; of more than ten, only the powers of two."""
    found = [k for k in range(1, 129) if number % k == 0]
    if len(found) > 10:
        found = [k for k in found if k.bit_count() == 1]
    return ", ".join(map(str, found))


def shown(value: object) -> str:
    """Return a value as YAML has it: true, false and null in lower case."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def setting(field: str, values: Iterable[object]) -> str:
    """Return "field: a or b", the values that a field can have, for a remedy."""
    return f"{field}: {' or '.join(map(shown, values))}"
