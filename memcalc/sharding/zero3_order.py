"""The order in which modules run in a micro-batch: DeepSpeed's stage 3 has hooks around each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from memcalc.sharding.engine import ROOT
from memcalc.sharding.zero3_modules import Module, ModuleTree
from memcalc.spec.recompute_plan import Segment, leaves


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
        reduces_at_end: see `Module`.
        reads_head: see `Module`.
        inside: positions of its parameters and of its submodules'; empty for the model itself.
        ends: positions of the parameters of a module around it that ends with it.
    """

    unit: int
    names: frozenset[str]
    parameters: tuple[int, ...]
    backward: bool
    again: bool = False
    releases: bool = True
    checkpointed: bool = False
    reduces_at_end: bool = False
    reads_head: bool = False
    inside: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


class Order:
    """The modules of a model in forward order.

    Args:
        modules: the modules of the model.
        stops_inside: whether recomputation of a layer stops at the last module that saves something.
        detached: whether the first layer's input needs no gradient, since nothing before it trains.
        reentrant: whether a recomputation runs all modules, and then a backward of its own.
        scores_itself: whether a forward without adapters and gradients runs between forward and backward.
    """

    def __init__(
        self,
        modules: ModuleTree,
        *,
        stops_inside: bool,
        detached: bool = False,
        reentrant: bool = False,
        scores_itself: bool = False,
    ) -> None:
        self.before, self.layers, self.after = modules
        self.stops_inside = stops_inside
        self.detached = detached
        self.reentrant = reentrant
        self.scores_itself = scores_itself

    def turns(self, plan: Segment) -> Iterator[ModuleTurn]:
        """Yield all turns of a micro-batch, the root's first; `plan`: the recomputation plan."""
        yield from _turns(ROOT, self.before.forward())
        for item in plan:
            for layer in [item] if isinstance(item, int) else leaves(item):
                for turn in _turns(layer, self.layers[layer].forward()):
                    yield turn._replace(checkpointed=not isinstance(item, int))
        yield from _turns(ROOT, (module for module in self.after.forward() if module.names))
        yield from self._ending([*_turns(ROOT, self.after.backward(), backward=True)])
        yield from self._back(plan)
        ends = () if self.detached else (module for module in self.before.backward() if module.names)
        for turn in _turns(ROOT, ends, backward=True):
            yield turn._replace(releases=False)  # their inputs need no gradient

    def scoring_turns(self) -> Iterator[ModuleTurn]:
        """Yield the turns of a forward with adapters disabled, outside autograd; none if the model scores nothing.

        PEFT then calls the layer that is adapted alone. Its own module still reads an adapter's weight, because
        DeepSpeed has registered it (parameter_offload.py, ZeROOrderedDict).
        """
        if not self.scores_itself:
            return
        yield from _scored(ROOT, self.before)
        for layer in sorted(self.layers):
            yield from _scored(layer, self.layers[layer])
        yield from (turn for turn in _scored(ROOT, self.after) if turn.names)

    def _ending(self, turns: Sequence[ModuleTurn]) -> Iterator[ModuleTurn]:
        """Yield turns of backward, in which only adapters end if the model has scored itself.

        Each forward of a module sets the number of its inputs that need a gradient, by which DeepSpeed knows the end of
        its backward. Outside autograd none does. Source: parameter_offload.py, _post_backward_module_hook.
        """
        read = {number for turn in turns for number in turn.parameters if _is_adapted(turn)}
        for turn in turns:
            ends = _is_adapter(turn) and read.isdisjoint(turn.parameters)
            yield turn._replace(releases=ends) if self.scores_itself else turn

    def _back(self, items: Segment) -> Iterator[ModuleTurn]:
        for item in reversed(items):
            if not isinstance(item, int):
                yield from self._again(item)
            else:
                yield from self._ending([*self._backward(item)])

    def _backward(self, layer: int) -> Iterator[ModuleTurn]:
        if self.detached and layer == min(self.layers):
            yield from _turns(layer, reversed([*_reached(self.layers[layer].forward())]), backward=True)
        else:
            yield from _turns(layer, self.layers[layer].backward(), backward=True)

    def _again(self, items: Segment) -> Iterator[ModuleTurn]:
        """Yield the turns of a checkpoint segment: all is recomputed except what follows the last layer's last module.

        If that module's backward is the first to read a tensor that was not saved, its backward has begun by then. Its
        recomputation stops where it would save that tensor, so its end hook does not run. A reentrant checkpoint runs
        all of it again first.
        """
        if self.reentrant:
            for layer in leaves(items):
                yield from _turns(layer, self.layers[layer].forward(), backward=True, again=True)
            for layer in reversed([*leaves(items)]):
                yield from self._backward(layer)
            return
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
        inside = () if unit == ROOT and not module.names else (*module.inside(),)
        yield ModuleTurn(
            unit,
            module.names,
            module.parameters,
            backward,
            again,
            reduces_at_end=module.reduces_at_end,
            reads_head=module.reads_head,
            inside=inside,
        )


def _scored(unit: int, module: Module, ends: tuple[int, ...] = ()) -> Iterator[ModuleTurn]:
    """Yield the turns of a module with its adapters disabled; `ends`: see `ModuleTurn`."""
    [turn] = _turns(unit, [module])
    adapted = _is_adapted(turn)
    yield turn._replace(checkpointed=True, releases=not adapted, ends=ends)
    for child in module.children[:1] if adapted else module.children:
        yield from _scored(unit, child, module.parameters if adapted else ())


def _is_adapted(turn: ModuleTurn) -> bool:
    """Return whether it is PEFT's module around an adapted layer, which reads a parameter of its adapter."""
    return bool(turn.parameters) and not turn.names and not turn.reads_head


def _is_adapter(turn: ModuleTurn) -> bool:
    return any(".lora_" in name for name in turn.names)
