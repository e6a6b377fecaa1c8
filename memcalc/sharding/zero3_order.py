"""The order in which a micro-batch comes to the reference decoder's modules, each of which has hooks around it.

Modules without parameters count, because something may be prefetched whenever a module begins: those that hold others,
and what stands where there is no norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from memcalc.estimation.sharding import Held
from memcalc.sharding.engine import ROOT
from memcalc.spec.segments import Segment, leaves

HEAD_NORMS = (".q_norm", ".k_norm")  # modules around a norm


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


class Module(NamedTuple):
    """A module: what programs call it, the numbers of its own parameters, and the modules in it."""

    names: frozenset[str] = frozenset()
    parameters: tuple[int, ...] = ()
    children: tuple[Module, ...] = ()

    def forward(self) -> Iterator[Module]:
        """It and all in it, as they begin."""
        yield self
        for child in self.children:
            yield from child.forward()

    def backward(self) -> Iterator[Module]:
        """The same in backward: what holds others still begins first."""
        yield self
        for child in reversed(self.children):
            yield from child.backward()


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
        before = _modules([held for held in root if held.where == "embedding"], numbers)
        layers = [_layer(units[layer], numbers) for layer in range(len(units) - 1)]
        after = _modules([held for held in root if held.where == "head"], numbers)
        if tied:
            after = (*after, Module(frozenset(["lm_head"]), (0,)))
        self.before, self.after, self.layers = Module(children=before), Module(children=after), layers

    def turns(self, plan: Segment) -> Iterator[Turn]:
        """All turns of a micro-batch, the root's first; `plan`: the layers, and which of them run again."""
        yield from _turns(ROOT, self.before.forward())
        for item in plan:
            for layer in [item] if isinstance(item, int) else leaves(item):
                for turn in _turns(layer, self.layers[layer].forward()):
                    yield turn._replace(checkpointed=not isinstance(item, int))
        yield from _turns(ROOT, [*self.after.forward()][1:])
        yield from _turns(ROOT, self.after.backward(), backward=True)
        yield from self._back(plan)
        for turn in _turns(ROOT, [*self.before.backward()][1:], backward=True):
            yield turn._replace(releases=False)  # their inputs need no gradient

    def _back(self, items: Segment) -> Iterator[Turn]:
        for item in reversed(items):
            if not isinstance(item, int):
                yield from self._again(item)
            else:
                yield from self._backward(item)

    def _backward(self, layer: int) -> Iterator[Turn]:
        yield from _turns(layer, self.layers[layer].backward(), backward=True)

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
                yield from _turns(layer, self.layers[layer].forward(), backward=True, again=True)
        if isinstance(last, int):
            modules = [*self.layers[last].forward()]
            end = 1 + max(at for at, module in enumerate(modules) if module.parameters)
            *others, end_of_it = _turns(last, modules[:end], backward=True, again=True)
            yield from (*others, end_of_it._replace(releases=not self.stops_inside))
            yield from rest
        yield from self._back(before)


def _turns(unit: int, modules: Iterable[Module], *, backward: bool = False, again: bool = False) -> Iterator[Turn]:
    for module in modules:
        yield Turn(unit, module.names, module.parameters, backward, again)


def _layer(parameters: Sequence[Held], numbers: Iterator[int]) -> Module:
    """Source: memcalc/step/decoder.py, Layer; step/norms.py, HeadNorm."""
    known: dict[str, list[Held]] = {}
    for held in parameters:
        known.setdefault(held.module.rpartition("*.")[2], []).append(held)
    made = {name: (held, tuple(next(numbers) for _ in held)) for name, held in known.items()}

    def module(name: str) -> Module:
        held, own = made[name]
        leaf = Module(frozenset(module_names(held[0])), own)
        return Module(children=(leaf,)) if name.endswith(HEAD_NORMS) else leaf

    def holder(name: str) -> Module:
        inside = [each for each in made if each.startswith(f"{name}.")]
        parts = dict.fromkeys(each.removeprefix(f"{name}.").partition(".")[0] for each in inside)
        children = (f"{name}.{part}" for part in parts)
        return Module(children=tuple(module(each) if each in made else holder(each) for each in children))

    def norm(name: str) -> Module:
        return module(name) if name in made else Module()

    attention = (holder("attention"), norm("attention_output_norm"))
    fed = (holder("mlp"), norm("mlp_output_norm"))
    return Module(children=(norm("input_norm"), *attention, norm("post_attention_norm"), *fed))


def _modules(parameters: Sequence[Held], numbers: Iterator[int]) -> tuple[Module, ...]:
    return tuple(
        Module(frozenset([name]), tuple(next(numbers) for _ in held))
        for name, held in groupby(parameters, key=lambda each: each.module)
    )


def module_names(held: Held) -> Iterator[str]:
    """What programs call the module of a parameter: the reference decoder's have other words for experts."""
    module = held.module.rpartition("*.")[2]
    yield module
    if held.routed:
        yield module.removesuffix("_proj")
