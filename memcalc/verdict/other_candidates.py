"""The runs that a file with open choices also describes, with all changes made to the assumed run since loading."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel

from memcalc.spec.rule_sets.run import RULES
from memcalc.spec.spec import Spec

_Model = TypeVar("_Model", bound=BaseModel)

_BLOCKS = ("model", "training", "parallelism", "hardware", "inference")


def other_candidates(spec: Spec) -> tuple[Spec, ...]:
    """Return the runs with other answers to the open choices of the run's file.

    Searches change a run: its micro-batch, layout or recomputation. Every field that differs from the loaded run gets
    the same value in the other candidates. Candidates that are then invalid are omitted, since they do not start.
    """
    others = spec.origin.others
    if others is None or not others.specs:
        return ()
    if others.of == spec.blocks:
        return others.specs
    runs = (_changed_alike(other, others.of, spec) for other in others.specs)
    return tuple(run for run in runs if run.blocks != spec.blocks and not any(any(rule(run)) for rule in RULES))


def _changed_alike(other: Spec, loaded: tuple[object, ...], spec: Spec) -> Spec:
    """Return another candidate with the changes from the loaded blocks to those of a run."""
    changes: dict[str, object] = {}
    for name, before in zip(_BLOCKS, loaded, strict=True):
        now, own = getattr(spec, name), getattr(other, name)
        if isinstance(before, BaseModel) and isinstance(now, BaseModel) and isinstance(own, BaseModel):
            changes[name] = _merged(own, before, now)
        elif now != before:
            changes[name] = now
    return other.model_copy(update=changes)


def _merged(own: _Model, before: BaseModel, now: BaseModel) -> _Model:
    """Return a block with those values of `now` that differ from `before`."""
    changes: dict[str, object] = {}
    for name in type(now).model_fields:
        old, new, mine = getattr(before, name, None), getattr(now, name), getattr(own, name, None)
        if old == new:
            continue
        if isinstance(old, BaseModel) and isinstance(new, BaseModel) and isinstance(mine, type(new)):
            new = _merged(mine, old, new)
        changes[name] = new
    return own.model_copy(update=changes) if changes else own
