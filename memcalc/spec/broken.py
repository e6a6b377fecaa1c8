"""What a rule of the specification finds."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.spec.yaml_source import Path


class Broken(NamedTuple):
    """A rule that does not hold: the key at fault, the rule with its numbers, the way out."""

    key: Path
    problem: str
    remedy: str
