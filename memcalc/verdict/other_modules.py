"""Whose modules run: what a run of plain modules would need with transformers' own, where that is much more or less."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.ledger.result import Result
from memcalc.spec.families import attends_eagerly, known_families
from memcalc.spec.loading import load

WORTH_SAYING = 0.1  # of the allocated peak: a difference from which on the other modules are named


class OtherModules(NamedTuple):
    """The same run with transformers' modules.

    Args:
        allocated_bytes: the peak of allocated memory.
        attention: the kernel that they attend with, where the family knows no fused one; "": that of the run.
    """

    allocated_bytes: int
    attention: str


def with_transformers(result: Result) -> OtherModules | None:
    """Return what a run of plain modules allocates with transformers', from formulas; None: about the same, or unknown.

    None also for another run than training with plain modules, and for families whose modules are not modelled.
    """
    spec = result.spec
    family = spec.model.architecture
    if spec.inference is not None or spec.training.implementation != "plain" or family not in known_families():
        return None
    eager = attends_eagerly(family, "huggingface")
    changes = ["implementation=huggingface", "attention_windows=mask", *(["attention=eager"] if eager else [])]
    try:
        other = estimate(load(spec.model_dump(), changes)).ledger.peak_bytes
    except InputError:  # modules that are not modelled, or that cannot run as the spec asks for
        return None
    if abs(other - result.ledger.peak_bytes) <= WORTH_SAYING * result.ledger.peak_bytes:
        return None
    return OtherModules(other, "eager" if eager and spec.training.attention != "eager" else "")
