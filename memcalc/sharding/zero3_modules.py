"""The modules of a model in forward order, as DeepSpeed's stage 3 hooks them.

Modules without parameters count, because prefetching may happen whenever a module begins: containers, activations,
dropout, and placeholders for absent norms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter
from memcalc.sharding.engine import ROOT

SAVED = ".saved"  # suffix of the trained copy of a module (PEFT's modules_to_save)
HEAD_NORMS = (".q_norm", ".k_norm")  # suffixes of modules that contain a norm
EXPERTS = ".experts"  # suffix of transformers' module that has the parameters of all routed experts
MLP = "mlp"  # the container of an MLP's layers
GATES, UP = (".gate_proj", ".gate_up_proj", EXPERTS), ".up_proj"  # suffixes of modules before an activation
OF_CONTAINER = (".sinks", ".A_log", ".dt", ".D", ".alpha_p", ".alpha_n")  # suffixes of parameters of a container itself


class Module(NamedTuple):
    """A module.

    Args:
        names: its names in programs.
        parameters: the positions of its own parameters.
        children: its submodules.
        trains: whether one of its own parameters trains.
        reduces_at_end: whether its gradients are reduced when its backward has ended, instead of one by one.
        reads_head: whether its own parameters are those of the LM head, which it reads without calling the LM head.
    """

    names: frozenset[str] = frozenset()
    parameters: tuple[int, ...] = ()
    children: tuple[Module, ...] = ()
    trains: bool = False
    reduces_at_end: bool = False
    reads_head: bool = False

    def inside(self) -> Iterator[int]:
        """Yield the positions of its parameters and of those of its submodules."""
        yield from self.parameters
        for child in self.children:
            yield from child.inside()

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


class ModuleCalls(NamedTuple):
    """How a unit of transformers' model calls its modules.

    Args:
        names: the modules with parameters in forward order, as in state_dict within the unit.
        silent_after: the modules that one without parameters follows, activations aside.
        mlp_is_module: whether a module contains the layers of the MLP.
        activation_is_module: whether a module without parameters applies the activation.
        hooks_experts_whole: whether DeepSpeed hooks a block with routed experts as one module, and none inside it
            (runtime/zero/leaf_module_config.py).
    """

    names: Sequence[str]
    silent_after: Collection[str]
    mlp_is_module: bool
    activation_is_module: bool
    hooks_experts_whole: bool


class ModuleTree(NamedTuple):
    """The modules of a model: those before the layers, the layers by number, and those after them."""

    before: Module
    layers: Mapping[int, Module]
    after: Module


def reference_modules(
    ordered: Sequence[LocalParameter], units: Mapping[int, Sequence[LocalParameter]], *, tied: bool
) -> ModuleTree:
    """Return the modules of the reference decoder, where registration order is forward order.

    Args:
        ordered: all parameters, in registration order.
        units: the same by unit.
        tied: whether the LM head has the embedding's weight.
    """
    outside, inside = _numbers(ordered)
    root = units[ROOT]
    before = _modules([parameter for parameter in root if parameter.where == "embedding"], outside)
    layers = {layer: _layer(units[layer], inside) for layer in sorted(units) if layer >= 0}
    after = _modules([parameter for parameter in root if parameter.where == "head"], outside)
    if tied:
        after = (*after, Module(frozenset(["lm_head"]), (0,)))
    return _wrapped(ModuleTree(Module(children=before), layers, Module(children=after)), ordered)


def _wrapped(tree: ModuleTree, ordered: Sequence[LocalParameter], wrappers: int = 1) -> ModuleTree:
    """Return the modules in those that PEFT puts around the model, if it has adapters."""
    if not any(parameter.module.endswith(".lora_A") for parameter in ordered):
        return tree
    before, layers, after = tree
    for _ in range(wrappers):
        before, after = Module(children=(before,)), Module(children=(after,))
    return ModuleTree(before, layers, after)


def transformers_modules(
    ordered: Sequence[LocalParameter],
    units: Mapping[int, Sequence[LocalParameter]],
    calls: Callable[[int], ModuleCalls],
    *,
    tied: bool,
    reads_head: bool,
    rotations: int,
    wrappers: int,
) -> ModuleTree:
    """Return the modules of a causal language model of transformers (5.23, models/*/modeling_*.py).

    Args:
        ordered: all parameters, in registration order.
        units: the same by unit.
        calls: the calls of a layer.
        tied: whether the LM head has the embedding's weight.
        reads_head: whether the model reads the LM head's weight instead of calling the LM head.
        rotations: calls of the module that makes a cos/sin cache.
        wrappers: modules that PEFT puts around a model with adapters.
    """
    outside, inside = _numbers(ordered)
    root = units[ROOT]
    embedding: list[Module] = []
    for module in _modules([each for each in root if each.where == "embedding"], outside):
        embedding += [module, *(Module() for _ in module.names.intersection(calls(ROOT).silent_after))]
    layers = {layer: _transformers_layer(units[layer], inside, calls(layer)) for layer in sorted(units) if layer >= 0}
    last = _modules([each for each in root if each.where == "head"], outside)
    norms, heads = (last, (Module(frozenset(["lm_head"]), (0,)),)) if tied else (last[:-1], last[-1:])
    model = Module(children=(*embedding, *(Module() for _ in range(rotations))))
    own = tuple(number for head in heads for number in head.parameters) if reads_head else ()
    called = () if reads_head else heads
    before = Module(frozenset(), own, (model,), reads_head=reads_head)
    after = Module(frozenset(), own, (Module(children=norms), *called), reads_head=reads_head)
    return _wrapped(ModuleTree(before, layers, after), ordered, wrappers)


def _numbers(ordered: Sequence[LocalParameter]) -> tuple[Iterator[int], Iterator[int]]:
    """Return the positions of parameters outside layers, and those of parameters in layers."""
    inside = [parameter.where == "layer" for parameter in ordered]
    return (number for number, each in enumerate(inside) if not each), (n for n, each in enumerate(inside) if each)


def _transformers_layer(parameters: Sequence[LocalParameter], numbers: Iterator[int], calls: ModuleCalls) -> Module:
    """Yield the module tree of a layer: its modules in the order of calls, in their containers."""
    names = [*map(_name, parameters)]
    with_experts = {before for before, experts, _ in (name.partition(f"{EXPERTS}.") for name in names) if experts}
    whole = with_experts if calls.hooks_experts_whole else set[str]()

    def owner(name: str) -> str:
        """Return the module that is hooked for a parameter's module."""
        before, experts, _ = name.partition(f"{EXPERTS}.")
        one = next((each for each in whole if name.startswith(f"{each}.")), f"{before}{EXPERTS}")
        if experts or one in whole:
            return one
        return name.rpartition(".")[0] if name.endswith(OF_CONTAINER) else name

    held: dict[str, dict[int, LocalParameter]] = {}
    for name, parameter in zip(names, parameters, strict=True):
        held.setdefault(owner(name), {})[next(numbers)] = parameter
    order = [*map(owner, calls.names)]
    called = sorted(held, key=lambda name: _first(name, order))
    activated = {name for name in called if calls.activation_is_module and _is_activated(name, called)}

    def inside(prefix: str) -> Iterator[Module]:
        """Yield the modules of a container, each container where the first of its modules is."""
        firsts = (name.removeprefix(prefix).partition(".")[0] for name in called if name.startswith(prefix))
        for name in (f"{prefix}{first}" for first in dict.fromkeys(firsts)):
            if name == MLP and not calls.mlp_is_module:
                yield from inside(f"{name}.")
                continue
            own, children = held.get(name, {}), (*inside(f"{name}."),)
            adapted = f"{name}.lora_A" in held
            # A container's operators run between those of its submodules.
            called_as = {_name(parameter) for parameter in own.values()} if adapted or not children else ()
            trains = any(parameter.trains for parameter in own.values())
            below = () if adapted else children
            module = Module(frozenset(called_as), tuple(own), below, trains, reduces_at_end=name in whole)
            yield _adapted(module, children) if adapted else module
            yield from (Module() for each in (activated, calls.silent_after) if name in each)

    return Module(children=(*inside(""),))


def _name(parameter: LocalParameter) -> str:
    """Return the name of a parameter's module within its layer."""
    return parameter.module.rpartition("*.")[2]


def _adapted(module: Module, adapters: Sequence[Module]) -> Module:
    """Return PEFT's wrapper (peft 0.19 tuners/lora/layer.py, Linear) of a module, dropout, and the adapter.

    The wrapper reads the dtype of lora_A's weight, which DeepSpeed then gathers for it, too (parameter_offload.py,
    ZeROOrderedDict).
    """
    return Module(parameters=adapters[0].parameters, children=(module, Module(), *adapters))


def _first(module: str, order: Sequence[str]) -> int:
    """Return the place of the first call of a module or of one in it."""
    return next((at for at, name in enumerate(order) if name == module or name.startswith(f"{module}.")), len(order))


def _is_activated(module: str, called: Collection[str]) -> bool:
    """Return whether an activation follows: an MLP's gate, its up projection without a gate, or routed experts."""
    return module.endswith(GATES) or (module.endswith(UP) and f"{module.removesuffix(UP)}.gate_proj" not in called)


def _layer(parameters: Sequence[LocalParameter], numbers: Iterator[int]) -> Module:
    """Yield the module tree of a layer. Source: memcalc/step/reference/decoder.py, Layer; norms.py, HeadNorm."""
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
        yield _adapted(module(name), adapters) if adapters else module(name)

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
