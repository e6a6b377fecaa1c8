"""What a rule of the specification finds."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.spec.yaml_source import Path


class Broken(NamedTuple):
    """A rule that does not hold: the key at fault, the rule with its numbers, the way out."""

    key: Path
    problem: str
    remedy: str


def divisors(number: int) -> str:
    """The powers of two that divide `number`, and itself, for a remedy."""
    found = [2**k for k in range(8) if number % 2**k == 0]
    return ", ".join(map(str, found if number in found or number > 128 else [*found, number]))
