"""A violation of a configuration rule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memcalc.spec.yaml_source import Path


class Violation(NamedTuple):
    """A violated rule: the field, the rule with its numbers, and the remedy."""

    key: Path
    problem: str
    remedy: str


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
