"""The optimizer step as requests: norms for clipping, states, the update's lists or buffers, an average's casts.

What the highest moment holds is known to `memcalc.estimation.optimizers`; this is the order in which it comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from memcalc.estimation.choice import Choice
from memcalc.estimation.copies import UNSPREAD
from memcalc.estimation.optimizers.buffers import Alive, Buffer, item_of
from memcalc.estimation.optimizers.lists import DECAYED, DROPPED_BEFORE, foreach_lists
from memcalc.estimation.optimizers.loops import SCRIPTS, gradient_script, makes_states_on_the_way
from memcalc.estimation.optimizers.states import first_phase, optimizer_states
from memcalc.estimation.optimizers.temporaries import Step, clipping_items
from memcalc.estimation.sharding import Held, Parameters
from memcalc.rehearsal.requests import Requests
from memcalc.spec.recipes import DTYPE_BYTES


class OptimizerStep:
    """Every step of a run; the first one makes the states.

    Args:
        requests: what they are asked of.
        parameters: all of them, as modules make them.
        choice: of the run.
    """

    def __init__(self, requests: Requests, parameters: Parameters, choice: Choice) -> None:
        self.requests = requests
        self.parameters = parameters
        self.choice = choice
        self.update = choice.update
        self.lazy = first_phase(self.update) != "optimizer"
        self.sizes: dict[Held, list[int]] = {}  # of one parameter's states
        for held in dict.fromkeys(parameters):
            states = optimizer_states(Parameters((held,)), self.update, UNSPREAD)
            self.sizes[held] = [state.item.each for state in states if not state.paged]

    def build(self) -> None:
        """States that are there as soon as the optimizer is."""
        if not self.lazy:
            self._make_states(in_order(self.parameters))

    def run(self, *, first: bool) -> None:
        """One step."""
        self._clip()
        foreach = self.update.implementation == "foreach"
        decayed_before = foreach and self.update.optimizer == "momentum" and self.update.decays
        on_the_way = makes_states_on_the_way(self.update) and not foreach
        lists: list[int] = self._list(DECAYED) if decayed_before else []
        if first and self.lazy and not on_the_way:
            self._make_states(in_order(self.parameters))
        if foreach:
            self._foreach(lists)
        elif self.update.implementation == "for-loop" and not self.update.paged:
            self._loop(makes=first and self.lazy and on_the_way)
        elif first and self.lazy and on_the_way:
            self._make_states(in_order(self.parameters))
        self._average()

    def _make_states(self, parameters: Iterable[Held]) -> None:
        for held in parameters:
            for size in self.sizes[held]:
                self.requests.take(size)

    def _clip(self) -> None:
        if not self.choice.clips:
            return
        step = Step(clips=True, averages_with_casts=False, spread=UNSPREAD, card=self.choice.card)
        items = clipping_items(self.parameters, self.update, step)
        self.requests.drop([self.requests.take(item.each) for item in items for _ in range(item.count)])

    def _list(self, name: str) -> list[int]:
        return [self.requests.take(self._bytes(held, Buffer(name))) for held in in_order(self.parameters)]

    def _foreach(self, lists: list[int]) -> None:
        """`lists`: those that are there already."""
        if self.update.decays and self.update.optimizer in DROPPED_BEFORE:
            self.requests.drop(self._list(DECAYED))
        names = foreach_lists(self.update)
        for name in names[1:] if lists else names:
            lists += self._list(name)
        if self.update.optimizer == "rprop":  # torch/optim/rprop.py: four times torch.where of each parameter
            for held in in_order(self.parameters):
                condition = self._bytes(held, Buffer("condition", dtype="bool"))
                chosen = self._bytes(held, Buffer("chosen"))
                self.requests.drop([self.requests.take(condition), self.requests.take(chosen)])
        self.requests.drop(lists)

    def _loop(self, *, makes: bool) -> None:
        """One parameter after the other; names hold what they are bound to until they are bound anew."""
        bound: dict[str, int] = {}
        script_of = SCRIPTS.get(self.update.optimizer)
        before = len(gradient_script(self.update)) if self.update.optimizer == "momentum" else 0  # its clone of that
        for held in in_order(self.parameters):
            script = () if script_of is None else script_of(self.update, held)
            for position, statement in enumerate(script):
                if makes and position == before:
                    self._make_states([held])
                temporaries = [self.requests.take(self._bytes(held, buffer)) for buffer in statement.temporaries]
                made = None if statement.result is None else self.requests.take(self._bytes(held, statement.result))
                self.requests.drop(temporaries)
                if statement.target in bound:
                    self.requests.drop([bound.pop(statement.target)])
                if made is not None:
                    bound[statement.target] = made
            if makes and len(script) <= before:
                self._make_states([held])
        self.requests.drop(bound.values())

    def _average(self) -> None:
        """memcalc/step/averages.py: what is not in fp32 is cast, one parameter after the other."""
        if self.choice.ema != "fp32" or self.update.dtype == "fp32":
            return
        for held in in_order(self.parameters):
            self.requests.drop([self.requests.take(DTYPE_BYTES["fp32"] * prod(held.shape))])

    def _bytes(self, held: Held, buffer: Buffer) -> int:
        alive = Alive(held._replace(count=1), buffer)
        return item_of(alive, self.update, UNSPREAD, self.choice.card, 0, "").each


def in_order(parameters: Parameters) -> Iterator[Held]:
    """The parameters as modules make them: the embedding's, each layer's in turn, the head's."""
    by_part: dict[str, list[Held]] = {"embedding": [], "layer": [], "head": []}
    for held in parameters:
        by_part[held.where].append(held)
    yield from by_part["embedding"]
    for _ in range(max((held.count for held in by_part["layer"]), default=0)):
        yield from by_part["layer"]
    yield from by_part["head"]
