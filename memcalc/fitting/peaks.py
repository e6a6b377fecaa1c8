"""What a run needs on its worst rank, and nothing else: the one seam between the searches and the estimate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from memcalc.estimation.estimate import rank_result
from memcalc.estimation.outside import communication_library_bytes, reserved_bytes
from memcalc.estimation.stages import Stage, composition, stages_of
from memcalc.estimation.states import state_rows
from memcalc.ledger.ledger import Rows
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
    stages = list(stages_that_matter(spec))
    if limit is not None:
        most = max(_at_least(spec, stage, card) for stage in stages)
        if most > limit:
            return most
    for stage in stages:
        most = max(most, rank_result(spec, stage, card).device_bytes or 0)
        if limit is not None and most > limit:
            break
    return most


def _at_least(spec: Spec, stage: Stage, card: Card) -> int:
    """Device memory without all that moves: parameters, their copies and states, which many runs share."""
    held = _most_held(state_rows(spec, stage))
    return reserved_bytes(held) + card.context_bytes + communication_library_bytes(spec)


@lru_cache(maxsize=1024)
def _most_held(states: Rows) -> int:
    """Bytes in the phase that holds most of them. Rows are equal only to themselves; equal runs share them."""
    held: dict[str, int] = {}
    for (phase, _), amount in states.sums.items():
        held[phase] = held.get(phase, 0) + amount
    return max(held.values())


def stages_that_matter(spec: Spec) -> Iterator[Stage]:
    """One stage of each kind, the one with most micro-batches in flight, which needs most of them.

    Stages are of one kind when they hold as many layers of each kind, and the same ends of the model.
    """
    found: dict[object, Stage] = {}
    for stage in stages_of(spec):
        kind = tuple(composition(spec, piece) for piece in stage.chunks)
        known = found.get(kind)
        if known is None or stage.in_flight > known.in_flight:
            found[kind] = stage
    return iter(found.values())
