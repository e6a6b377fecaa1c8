"""Parameters gathered by ZeRO stage 3 during a step, once it knows the order of modules (from the second step on).

DeepSpeed 0.19 runtime/zero/partitioned_param_coordinator.py, simulated module by module. Before a module runs, its
parameters are gathered and, up to a bound, those of the next modules. Afterwards its parameters are released unless one
of the next modules, up to a distance, uses them again. Parameters with few elements stay gathered. Parameters gathered
together are all-gathered into one buffer and copied out of it when their modules run; the buffer is live until the last
copy. For weights of routed experts autograd saves views, not the parameters, which DeepSpeed replaces (linear.py,
ctx.save_for_backward), so what forward has gathered stays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, takewhile
from typing import NamedTuple

from memcalc.layout.gradient_order import gradient_order, layers_of
from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.spec.zero import ZeroSpec

# Defaults of runtime/zero/config.py, in elements.
MOST_LIVE = 1_000_000_000  # stage3_max_live_parameters: above it nothing is prefetched
REUSE_DISTANCE = 1_000_000_000  # stage3_max_reuse_distance: parameters used again within this distance stay


class ModuleUse(NamedTuple):
    """The run of one module in a step.

    Args:
        parameters: numbers of its parameters.
        place: "embedding", "layer" or "head".
        layer: number of its layer.
        forward: whether it is a forward, else a backward.
    """

    parameters: tuple[int, ...]
    place: str
    layer: int
    forward: bool


class GatheredElements(NamedTuple):
    """Maximum number of gathered elements in each part of a step.

    Args:
        forward_layers: in each layer's forward.
        forward_head: in the LM head's forward.
        loss: in the loss.
        backward_head: in the LM head's backward.
        backward_layers: in each layer's backward.
        backward_embedding: in the embedding's backward.
        at_gradient: when each parameter's gradient is produced.
    """

    forward_layers: tuple[int, ...]
    forward_head: int
    loss: int
    backward_head: int
    backward_layers: tuple[int, ...]
    backward_embedding: int
    at_gradient: tuple[int, ...]

    @property
    def widest_forward(self) -> int:
        """The layer with the most gathered elements in forward, the last of equal ones."""
        return max(range(len(self.forward_layers)), key=lambda layer: (self.forward_layers[layer], layer))


@lru_cache(maxsize=1024)
def gathered(
    parameters: LocalParameters, zero: ZeroSpec, *, recomputes: bool, detached: bool = False
) -> GatheredElements:
    """Return the gathered elements of a steady step.

    Args:
        parameters: parameters of the stage.
        zero: the sizes of the prefetch and of parameters that stay gathered.
        recomputes: whether every layer is recomputed in backward.
        detached: whether the first layer's input needs no gradient, since nothing before it trains.
    """
    elements, uses = module_turns(parameters, recomputes=recomputes, detached=detached)
    routed = [each.number for each in gradient_order(parameters) if each.routed] if not recomputes else []
    heights = list(_play(elements, uses, zero, frozenset(routed)))
    most: dict[tuple[str, bool, int], int] = {}
    at_gradient: dict[int, int] = {}  # the last use of a parameter is in backward
    for use, height in zip(uses, heights, strict=True):
        key = (use.place, use.forward, use.layer)
        most[key] = max(most.get(key, 0), height.most)
        at_gradient.update(dict.fromkeys(use.parameters, height.most))
    layers = range(max(use.layer for use in uses) + 1)
    turn = next(number for number, use in enumerate(uses) if not use.forward)
    return GatheredElements(
        tuple(most.get(("layer", True, layer), 0) for layer in layers),
        heights[turn - 1].inside,  # when logits are produced, the LM head has been copied out of its buffer
        heights[turn - 1].after,
        most.get(("head", False, 0), 0),
        tuple(most.get(("layer", False, layer), 0) for layer in layers),
        most.get(("embedding", False, 0), 0),
        tuple(at_gradient[number] for number in range(len(elements))),
    )


def module_turns(
    parameters: LocalParameters, *, recomputes: bool, detached: bool = False
) -> tuple[list[int], list[ModuleUse]]:
    """Return the elements of every parameter, and a step's module runs in order, the root first; see `gathered`."""
    elements: list[int] = []
    before = _numbered(_modules(parameters, "embedding"), elements)
    layers = [_numbered(_modules(layer, "layer"), elements) for layer in layers_of(parameters)]
    after = _numbered(_modules(parameters, "head"), elements)
    if not any(parameter.module in ("lm_head", "score") for parameter in parameters) and before:
        after.append(before[0][:1])  # the tied embedding weight

    def uses(place: str, modules: Iterable[tuple[int, ...]], *, layer: int = 0, forward: bool) -> list[ModuleUse]:
        return [ModuleUse(module, place, layer, forward) for module in modules]

    # The model runs as a module itself, and PEFT's wrapper as another.
    adapted = any(parameter.module.endswith(".lora_A") for parameter in parameters)
    roots: list[tuple[int, ...]] = [(), ()] if adapted else [()]
    forward = uses("embedding", [*roots, *before], forward=True)
    backward = uses("head", [*roots, *reversed(after)], forward=False)
    for number, layer in enumerate(layers):
        forward += uses("layer", layer, layer=number, forward=True)
    forward += uses("head", after, forward=True)
    for number in reversed(range(len(layers))):
        # Recomputation stops at the last linear layer: its input is the last missing tensor.
        again = (
            layers[number][: 1 + max(at for at, module in enumerate(layers[number]) if module)] if recomputes else []
        )
        reached = _reached(next(layers_of(parameters)), layers[0]) if detached and not number else layers[number]
        backward += uses("layer", [*again, *reversed(reached)], layer=number, forward=False)
    if not detached:
        backward += uses("embedding", reversed(before), forward=False)
    return elements, forward + backward


def _reached(layer: list[LocalParameter], numbered: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the modules of the first layer that backward reaches although its input needs no gradient.

    Modules that read the input, or what follows from it, are not reached until a trained module has run.
    """
    found = []
    branch = stream = False  # whether the hidden state needs a gradient: inside attention or MLP, and after it
    for tensors, numbers in zip(_modules(layer, "layer"), numbered, strict=True):
        path = tensors[0].module if tensors else ""
        trains = any(parameter.trains for parameter in tensors)
        stream = stream or (branch and bool(path) and ".attention." not in path)
        needed = branch if path.endswith(("o_proj", "down_proj")) else stream
        if trains or needed or not tensors:
            found.append(numbers)
        branch = branch or trains
    return found


def _numbered(modules: Iterable[Sequence[LocalParameter]], elements: list[int]) -> list[tuple[int, ...]]:
    """Return the numbers of each module's parameters, and append their elements."""
    found = []
    for tensors in modules:
        found.append(tuple(range(len(elements), len(elements) + len(tensors))))
        elements.extend(parameter.elements for parameter in tensors)
    return found


def _modules(parameters: Iterable[LocalParameter], where: str) -> list[list[LocalParameter]]:
    """Return a part's modules in order, each with its tensors.

    Modules without parameters count, too: in a layer those that contain others (the layer, its attention, its MLP), and
    after them the places of a possible norm or dropout.
    """
    found: list[list[LocalParameter]] = []
    inside: list[str] = []
    for module, tensors in groupby(
        (parameter for parameter in parameters if parameter.where == where), key=lambda parameter: parameter.module
    ):
        if module.endswith(".lora_A"):  # PEFT's wrapper runs before the linear layer that it wraps, its dropout after
            found[-1:] = [[], found[-1], []]
        own = module.removesuffix(".lora_A").removesuffix(".lora_B")
        holders = own.split(".")[2:-1] if where == "layer" else []
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(inside, holders, strict=False)))
        found += [[] for _ in inside[alike:]]  # modules left
        found += [[] for _ in holders[alike:]]  # modules entered
        inside = holders
        found.append(list(tensors))
    found += [[] for _ in inside]
    return [[], *found] if where == "layer" else found


class GatheredPeak(NamedTuple):
    """Gathered elements: the maximum from a module's request on, while it runs, and after it."""

    most: int
    inside: int
    after: int


class AllGatherBucket:
    """Parameters all-gathered into one buffer: copied out at once, freed when the last one has been requested."""

    def __init__(self, waiting: list[int], size: int) -> None:
        self.waiting = set(waiting)
        self.size = size
        self.copied = False


class Coordinator:
    """Gathered parameters, given their elements; `held` also counts buffers, `live` is compared with the bound."""

    def __init__(self, elements: list[int], persistent: int) -> None:
        self.elements, self.persistent = elements, persistent
        self.there = {number for number, size in enumerate(elements) if size <= persistent}
        self.held = sum(elements[number] for number in self.there)
        self.live = 0
        self.arriving: dict[int, AllGatherBucket] = {}

    def gather(self, wanted: Iterable[int]) -> None:
        """Gather missing parameters: a single one into its own memory, several into a buffer."""
        missing = [number for number in wanted if number not in self.there]
        size = sum(self.elements[number] for number in missing)
        self.live, self.held = self.live + size, self.held + size
        self.there.update(missing)
        if len(missing) > 1:
            self.arriving.update(dict.fromkeys(missing, AllGatherBucket(missing, size)))

    def ask_for(self, number: int) -> int:
        """Wait for a parameter; return the maximum number of live elements meanwhile."""
        together = self.arriving.pop(number, None)
        if together is None:
            return self.held
        if not together.copied:
            self.held, together.copied = self.held + together.size, True
        most = self.held
        together.waiting.remove(number)
        if not together.waiting:
            self.held -= together.size
        return most

    def let_go(self, number: int, *, viewed: bool) -> None:
        """Release a parameter unless it is persistent; if a view of it is saved, its memory stays allocated."""
        size = self.elements[number]
        if size > self.persistent and number in self.there:
            self.there.remove(number)
            self.live, self.held = self.live - size, self.held - (0 if viewed else size)


def _play(elements: list[int], uses: list[ModuleUse], zero: ZeroSpec, routed: frozenset[int]) -> Iterator[GatheredPeak]:
    """Yield the gathered elements around each module's run; autograd saves views of `routed` parameters."""
    views: set[int] = set()
    passed = [0, *accumulate(sum(elements[number] for number in use.parameters) for use in uses)]
    turns_of: dict[int, list[int]] = {}
    for turn, use in enumerate(uses):
        for number in use.parameters:
            turns_of.setdefault(number, []).append(turn)
    queue = deque((number, turn) for turn, use in enumerate(uses) for number in use.parameters)
    fetched_for = dict.fromkeys(turns_of, -1)  # the last run that a parameter was taken off the queue for
    coordinator = Coordinator(elements, zero.param_persistence_threshold)
    for turn, use in enumerate(uses):
        coordinator.gather(use.parameters)
        most = max((coordinator.ask_for(number) for number in use.parameters), default=coordinator.held)
        for _ in [number for number in use.parameters if fetched_for[number] < turn]:
            number, later = queue.popleft()
            fetched_for[number] = later
        ahead: list[int] = []
        size, room = 0, min(MOST_LIVE - coordinator.live, zero.prefetch_bucket_size)
        while queue and size < room:
            number, later = queue.popleft()
            if number not in coordinator.there and number not in ahead:
                ahead.append(number)
                size += elements[number]
            fetched_for[number] = max(fetched_for[number], later)
        coordinator.gather(ahead)
        inside = coordinator.held
        most = max(most, inside)
        for number in use.parameters:
            again = bisect_left(turns_of[number], turn + 1)
            far = again == len(turns_of[number]) or (
                passed[turns_of[number][again]] - passed[turn + 1] >= REUSE_DISTANCE
            )
            if not use.forward and number in views:
                views.remove(number)
                coordinator.held -= elements[number]
            if far and fetched_for[number] <= turn + 1:
                viewed = use.forward and number in routed and number in coordinator.there
                views.update((number,) if viewed else ())
                coordinator.let_go(number, viewed=viewed)
        yield GatheredPeak(most, inside, coordinator.held)
