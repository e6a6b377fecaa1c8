"""Plain compared with transformers' modules: the need of the same run, if it differs much."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.ledger.result import Result
from memcalc.spec.loading import load
from memcalc.spec.model_families.conversion import attends_eagerly, known_families

WORTH_SAYING = 0.1  # fraction of the allocated peak: smaller differences are not reported


class OtherModules(NamedTuple):
    """The same run with transformers' modules.

    Args:
        allocated_bytes: peak allocated memory.
        attention: their attention kernel, if the family has no fused one; "": the same as the run's.
    """

    allocated_bytes: int
    attention: str


def with_transformers(result: Result) -> OtherModules | None:
    """Return the allocated peak of a plain-module run with transformers' modules; None if about equal or unknown.

    None also for runs other than training with plain modules, and for families without modelled modules.
    """
    spec = result.spec
    family = spec.model.architecture
    if spec.inference is not None or spec.training.implementation != "plain" or family not in known_families():
        return None
    eager = attends_eagerly(family, "huggingface")
    changes = ["implementation=huggingface", "attention_windows=mask", *(["attention=eager"] if eager else [])]
    try:
        other = estimate(load(spec.model_dump(), changes)).ledger.peak_bytes
    except InputError:  # the modules are not modelled, or cannot run with this spec
        return None
    if abs(other - result.ledger.peak_bytes) <= WORTH_SAYING * result.ledger.peak_bytes:
        return None
    return OtherModules(other, "eager" if eager and spec.training.attention != "eager" else "")
