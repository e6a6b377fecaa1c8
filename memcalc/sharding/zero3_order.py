"""The order of modules in a micro-batch of the reference decoder; each module has hooks around it.

Modules without parameters count, because prefetching may happen whenever a module begins: containers, and placeholders
for absent norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter
from memcalc.sharding.engine import ROOT
from memcalc.spec.recompute_plan import Segment, leaves

SAVED = ".saved"  # suffix of the trained copy of a module (PEFT's modules_to_save)
HEAD_NORMS = (".q_norm", ".k_norm")  # suffixes of modules that contain a norm


class ModuleTurn(NamedTuple):
    """One run of a module, in forward or backward.

    Args:
        unit: the unit of the module.
        names: its names in programs; empty if it has no parameters, and so no operator.
        parameters: their positions in registration order.
        backward: whether it is in backward.
        again: whether it is a recomputation.
        releases: whether its parameters may be freed when its operator has ended.
        checkpointed: whether it runs under a checkpoint, where autograd saves nothing.
    """

    unit: int
    names: frozenset[str]
    parameters: tuple[int, ...]
    backward: bool
    again: bool = False
    releases: bool = True
    checkpointed: bool = False


class Module(NamedTuple):
    """A module: its names in programs, the positions of its own parameters, and its submodules."""

    names: frozenset[str] = frozenset()
    parameters: tuple[int, ...] = ()
    children: tuple[Module, ...] = ()
    trains: bool = False

    def forward(self) -> Iterator[Module]:
        """Yield the module and its submodules in forward order."""
        yield self
        for child in self.children:
            yield from child.forward()

    def backward(self) -> Iterator[Module]:
        """Yield the module and its submodules in backward order: a container still begins first."""
        yield self
        for child in reversed(self.children):
            yield from child.backward()


class Order:
    """The modules of a model in forward order.

    Args:
        ordered: all parameters, in registration order, which is forward order.
        units: the same by unit.
        tied: whether the LM head has the embedding's weight.
        stops_inside: whether recomputation of a layer stops at the last module that saves something.
        detached: whether the first layer's input needs no gradient, since nothing before it trains.
    """

    def __init__(
        self,
        ordered: Sequence[LocalParameter],
        units: Mapping[int, Sequence[LocalParameter]],
        *,
        tied: bool,
        stops_inside: bool,
        detached: bool = False,
    ) -> None:
        self.stops_inside = stops_inside
        self.detached = detached
        numbers = iter(range(len(ordered)))
        root = units[ROOT]
        before = _modules([parameter for parameter in root if parameter.where == "embedding"], numbers)
        self.layers = {layer: _layer(units[layer], numbers) for layer in sorted(units) if layer >= 0}
        after = _modules([parameter for parameter in root if parameter.where == "head"], numbers)
        if tied:
            after = (*after, Module(frozenset(["lm_head"]), (0,)))
        self.before, self.after = Module(children=before), Module(children=after)
        if any(parameter.module.endswith(".lora_A") for parameter in ordered):  # PEFT wraps the model
            self.before, self.after = Module(children=(self.before,)), Module(children=(self.after,))

    def turns(self, plan: Segment) -> Iterator[ModuleTurn]:
        """Yield all turns of a micro-batch, the root's first; `plan`: the recomputation plan."""
        yield from _turns(ROOT, self.before.forward())
        for item in plan:
            for layer in [item] if isinstance(item, int) else leaves(item):
                for turn in _turns(layer, self.layers[layer].forward()):
                    yield turn._replace(checkpointed=not isinstance(item, int))
        yield from _turns(ROOT, (module for module in self.after.forward() if module.names))
        yield from _turns(ROOT, self.after.backward(), backward=True)
        yield from self._back(plan)
        ends = () if self.detached else (module for module in self.before.backward() if module.names)
        for turn in _turns(ROOT, ends, backward=True):
            yield turn._replace(releases=False)  # their inputs need no gradient

    def _back(self, items: Segment) -> Iterator[ModuleTurn]:
        for item in reversed(items):
            if not isinstance(item, int):
                yield from self._again(item)
            else:
                yield from self._backward(item)

    def _backward(self, layer: int) -> Iterator[ModuleTurn]:
        if self.detached and layer == min(self.layers):
            yield from _turns(layer, reversed([*_reached(self.layers[layer].forward())]), backward=True)
        else:
            yield from _turns(layer, self.layers[layer].backward(), backward=True)

    def _again(self, items: Segment) -> Iterator[ModuleTurn]:
        """Yield the turns of a checkpoint segment: all is recomputed except what follows the last layer's last module.

        If that module's backward is the first to read a tensor that was not saved, its backward has begun by then. Its
        recomputation stops where it would save that tensor, so its end hook does not run.
        """
        last = items[-1]
        begun: list[ModuleTurn] = []
        rest: list[ModuleTurn] = []
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


def _reached(modules: Iterable[Module]) -> Iterator[Module]:
    """Yield the modules of the first layer that backward reaches although the layer's input needs no gradient.

    Modules that read the input, or what follows from it, are not reached until a trained module has run.
    """
    branch = stream = False  # whether the hidden state needs a gradient: inside attention or MLP, and after it
    for module in modules:
        name = next(iter(module.names), "")
        stream = stream or (branch and bool(name) and not name.startswith("attention."))
        needed = branch if name.endswith(("o_proj", "down_proj")) else stream
        if module.trains or needed or not name:
            yield module
        branch = branch or module.trains


def _turns(
    unit: int, modules: Iterable[Module], *, backward: bool = False, again: bool = False
) -> Iterator[ModuleTurn]:
    for module in modules:
        yield ModuleTurn(unit, module.names, module.parameters, backward, again)


def _layer(parameters: Sequence[LocalParameter], numbers: Iterator[int]) -> Module:
    """Return the module tree of a layer. Source: memcalc/step/reference/decoder.py, Layer; norms.py, HeadNorm."""
    known: dict[str, list[LocalParameter]] = {}
    for parameter in parameters:
        known.setdefault(parameter.module.rpartition("*.")[2], []).append(parameter)
    made = {name: (held, tuple(next(numbers) for _ in held)) for name, held in known.items()}

    def module(name: str) -> Module:
        held, own = made[name]
        leaf = Module(frozenset(module_names(held[0])), own, trains=any(each.trains for each in held))
        return Module(children=(leaf,)) if name.endswith(HEAD_NORMS) else leaf

    def holder(name: str) -> Module:
        inside = [each for each in made if each.startswith(f"{name}.")]
        parts = dict.fromkeys(each.removeprefix(f"{name}.").partition(".")[0] for each in inside)
        return Module(children=tuple(each for part in parts for each in parts_of(f"{name}.{part}")))

    def parts_of(name: str) -> Iterator[Module]:
        if name not in made:
            yield holder(name)
            return
        adapters = holder(name).children
        yield from (Module(), module(name), Module(), *adapters) if adapters else (module(name),)  # PEFT's wrapper

    def norm(name: str) -> Module:
        return module(name) if name in made else Module()

    attention = (holder("attention"), norm("attention_output_norm"))
    fed = (holder("mlp"), norm("mlp_output_norm"))
    named = ("input_norm", "attention", "attention_output_norm", "post_attention_norm", "mlp", "mlp_output_norm")
    others = dict.fromkeys(name.partition(".")[0] for name in made if name.partition(".")[0] not in named)
    mixers = (each for name in others for each in parts_of(name))  # in place of attention, or beside it
    return Module(children=(norm("input_norm"), *attention, *mixers, norm("post_attention_norm"), *fed))


def _modules(parameters: Sequence[LocalParameter], numbers: Iterator[int]) -> tuple[Module, ...]:
    found: list[Module] = []
    copied = {parameter.module for parameter in parameters if parameter.module.endswith(SAVED)}
    for name, held in groupby(parameters, key=lambda each: each.module):
        own = tuple(next(numbers) for _ in held)
        if f"{name}{SAVED}" not in copied:  # PEFT runs the trained copy in place of the module
            found.append(Module(frozenset([name.removesuffix(SAVED)]), own))
    return tuple(found)


def module_names(parameter: LocalParameter) -> Iterator[str]:
    """Yield the names of a parameter's module in programs: the reference decoder names experts differently."""
    module = parameter.module.rpartition("*.")[2]
    yield module
    if parameter.routed:
        yield module.removesuffix("_proj")
