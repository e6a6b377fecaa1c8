"""What the optimizer step makes and keeps: the states of the update, and what is alive in its highest moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memcalc.estimation.choice import Choice
from memcalc.estimation.items import BIT, Item
from memcalc.estimation.optimizers.states import State
from memcalc.estimation.optimizers.temporaries import Step, part_of, step_temporaries
from memcalc.estimation.sharding import Parameters


def step_items(parameters: Parameters, choice: Choice, states: Sequence[State]) -> Iterator[Item]:
    """States, and the temporaries of the step; those states that its first highest moment has not yet, later."""
    update = choice.update
    made: dict[str, int] = {}
    for state in states:
        if not state.item.mask & BIT["optimizer"]:
            part = part_of(state.held, update)
            made[part] = made.get(part, 0) + state.item.block * state.item.count
    casts = choice.ema == "fp32" and update.dtype != "fp32"
    step = Step(choice.clips, casts, choice.spread(1), choice.card)
    highest = step_temporaries(parameters, update, step, made)
    for state in states:
        item = state.item
        late = part_of(state.held, update) not in highest.made
        yield item._replace(mask=item.mask & ~BIT["optimizer_step_1"]) if late else item
    yield from highest.items
