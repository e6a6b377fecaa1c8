"""Variants of a run in some fields, without loading it again, checked by the same rules and by their lower bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memcalc.spec.rule_sets.run import RULES
from memcalc.spec.rule_sets.violations import Violation
from memcalc.spec.spec import Spec
from memcalc.verdict.needs import least_bytes


def varied(spec: Spec, **blocks: dict[str, Any]) -> Spec:
    """Return the run with other values, by block: `varied(spec, training={"micro_batch_size": 2})`.

    Values are not validated: they must have the right type, and the caller sets fields that depend on them.
    """
    return spec.model_copy(
        update={name: getattr(spec, name).model_copy(update=fields) for name, fields in blocks.items() if fields}
    )


Reader = Callable[[Spec], Spec]  # returns a variant as the run's file is read with its values; see `UserRun.as_read`


def violated_rule(spec: Spec) -> Violation | None:
    """Return the first rule that the run violates; None if it is valid."""
    for rule in RULES:
        for broken in rule(spec):
            return broken
    return None


def is_hopeless(spec: Spec, *, first_stage: bool = False) -> bool:
    """Return whether the lower bound exceeds the GPU; `first_stage` as in `least_bytes`."""
    gpu = spec.gpu
    return gpu is not None and least_bytes(spec, gpu, gpu.usable_bytes, first_stage=first_stage) > gpu.usable_bytes
