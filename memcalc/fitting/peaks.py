"""What a run needs on its worst rank, and nothing else: the one seam between the searches and the estimate."""

from __future__ import annotations

from memcalc.estimation.moving import peak_bytes
from memcalc.estimation.outside import outside_allocated, reserved_bytes
from memcalc.estimation.stages import Stage, stages_that_matter
from memcalc.estimation.states import state_peak
from memcalc.spec.cards import Card
from memcalc.spec.spec import Spec


def device_bytes(spec: Spec, card: Card, limit: int | None = None) -> int:
    """Device memory of the rank that needs most, as `estimate` gives it.

    Args:
        spec: the run; `hardware.gpu` names `card`.
        card: the card.
        limit: stop at the first stage that needs more: what is returned is then no maximum, but above the limit.
    """
    most = 0
    stages = stages_that_matter(spec)
    if limit is not None:
        most = max(_at_least(spec, stage, card) for stage in stages)
        if most > limit:
            return most
    for stage in stages:
        most = max(most, _on_device(spec, card, peak_bytes(spec, stage, card)))
        if limit is not None and most > limit:
            break
    return most


def _at_least(spec: Spec, stage: Stage, card: Card) -> int:
    """Device memory without all that moves: parameters, their copies and states, which many runs share."""
    return _on_device(spec, card, state_peak(spec, stage))


def _on_device(spec: Spec, card: Card, allocated: int) -> int:
    reserved = reserved_bytes(allocated)
    outside = outside_allocated(spec, card, allocated, reserved)
    return reserved + outside.device_context + outside.communication_library
