"""A violation of a configuration rule."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.spec.yaml_source import Path


class Violation(NamedTuple):
    """A violated rule: the field, the rule with its numbers, and the remedy."""

    key: Path
    problem: str
    remedy: str


def divisors(number: int) -> str:
    """Return the powers of two that divide `number`, and the number itself, for a remedy."""
    found = [2**k for k in range(8) if number % 2**k == 0]
    return ", ".join(map(str, found if number in found or number > 128 else [*found, number]))
