"""The order in which a micro-batch comes to a model's modules, each of which has ZeRO's hooks around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from memcalc.estimation.engines.zero3_gathering import modules_of
from memcalc.estimation.sharding import Held
from memcalc.sharding.engine import ROOT
from memcalc.spec.segments import Segment, leaves


class Turn(NamedTuple):
    """A module's turn.

    Args:
        unit: that it is part of.
        names: what programs call it; none: it has no parameters, and no operator.
        parameters: their numbers in registration order.
        backward: whether it is in backward.
        again: whether it is a forward that runs again.
        releases: whether its parameters may be released when its operator has ended.
        checkpointed: whether a checkpoint keeps autograd from saving anything.
    """

    unit: int
    names: frozenset[str]
    parameters: tuple[int, ...]
    backward: bool
    again: bool = False
    releases: bool = True
    checkpointed: bool = False

    def named(self, unit: int, name: str) -> bool:
        """Whether it is this module's."""
        return self.unit == unit and name in self.names


class Module(NamedTuple):
    """A module: what programs call it, and the numbers of its parameters."""

    names: frozenset[str]
    parameters: tuple[int, ...]


class Order:
    """The modules of a model in the order of its forward.

    Args:
        ordered: all parameters, in registration order, which is that of forward.
        units: the same by unit.
        tied: whether the LM head has the embedding's weight.
        stops_inside: whether what the last module keeps is the last that a layer that runs again is run for.
    """

    def __init__(
        self, ordered: Sequence[Held], units: Mapping[int, Sequence[Held]], *, tied: bool, stops_inside: bool
    ) -> None:
        self.stops_inside = stops_inside
        numbers = iter(range(len(ordered)))
        root = units[ROOT]
        self.before = _numbered([held for held in root if held.where == "embedding"], "embedding", numbers)
        self.layers = [
            _numbered(units[layer], "layer", numbers) for layer in range(len(units) - 1)
        ]
        self.after = _numbered([held for held in root if held.where == "head"], "head", numbers)
        if tied:
            self.after.append(Module(frozenset(["lm_head"]), (0,)))

    def turns(self, plan: Segment) -> Iterator[Turn]:
        """All turns of a micro-batch, the root's first; `plan`: the layers, and which of them run again."""
        none = Module(frozenset(), ())
        yield from _turns(ROOT, [none, *self.before])
        for item in plan:
            for layer in [item] if isinstance(item, int) else leaves(item):
                for turn in _turns(layer, self.layers[layer]):
                    yield turn._replace(checkpointed=not isinstance(item, int))
        yield from _turns(ROOT, self.after)
        yield from _turns(ROOT, [none, *reversed(self.after)], backward=True)
        yield from self._back(plan)
        for turn in _turns(ROOT, reversed(self.before), backward=True):
            yield turn._replace(releases=False)

    def _back(self, items: Segment) -> Iterator[Turn]:
        for item in reversed(items):
            if not isinstance(item, int):
                yield from self._again(item)
            else:
                yield from self._backward(item)

    def _backward(self, layer: int) -> Iterator[Turn]:
        yield from _turns(layer, reversed(self.layers[layer]), backward=True)

    def _again(self, items: Segment) -> Iterator[Turn]:
        """A segment: all runs again but what follows the last layer's last module.

        If that is what first reads something that was not kept, its backward has begun by then. Its forward stops where
        it would keep that, so that its end is not seen.
        """
        last = items[-1]
        begun: list[Turn] = []
        rest: list[Turn] = []
        if isinstance(last, int):
            rest = [*self._backward(last)]
            first = 1 + next(at for at, turn in enumerate(rest) if turn.parameters)
            if self.stops_inside:
                begun, rest = [turn._replace(releases=False) for turn in rest[:first]], rest[first:]
        yield from begun
        before = items[:-1] if isinstance(last, int) else items
        for item in before:
            for layer in [item] if isinstance(item, int) else leaves(item):
                yield from _turns(layer, self.layers[layer], backward=True, again=True)
        if isinstance(last, int):
            modules = self.layers[last]
            end = 1 + max(at for at, module in enumerate(modules) if module.parameters)
            *others, end_of_it = _turns(last, modules[:end], backward=True, again=True)
            yield from (*others, end_of_it._replace(releases=not self.stops_inside))
            yield from rest
        yield from self._back(before)


def _turns(unit: int, modules: Iterable[Module], *, backward: bool = False, again: bool = False) -> Iterator[Turn]:
    for module in modules:
        yield Turn(unit, module.names, module.parameters, backward, again)


def _numbered(parameters: Sequence[Held], where: str, numbers: Iterator[int]) -> list[Module]:
    found: list[Module] = []
    for tensors in modules_of(parameters, where):
        names = {name for held in tensors for name in module_names(held)}
        found.append(Module(frozenset(names), tuple(next(numbers) for _ in tensors)))
    return found


def module_names(held: Held) -> Iterator[str]:
    """What programs call the module of a parameter: the reference decoder's have other words for experts."""
    module = held.module.rpartition("*.")[2]
    yield module
    if held.routed:
        yield module.removesuffix("_proj")
