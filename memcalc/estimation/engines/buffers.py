"""What engines hold: buffers that stand through whole phases, and those around the layer that is being computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from memcalc.estimation.allocation import rounded
from memcalc.estimation.choice import Choice
from memcalc.estimation.items import Item
from memcalc.estimation.sharding import Held, Parameters
from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES

NONE: Mapping[bool, Item] = MappingProxyType({})  # by kind of layer: dense under False, with experts under True


class Around(NamedTuple):
    """Buffers that come and go with the layer that is being computed; their masks are set where they are used."""

    forward_layer: tuple[Item, ...] = ()
    forward_widest: tuple[Item, ...] = ()  # of the layer around which there is most of them, if not the last
    forward_head: tuple[Item, ...] = ()
    before_layer: tuple[Item, ...] = ()  # in the moment before a layer's forward, when its parameters arrive
    before_first_layer: tuple[Item, ...] = ()
    before_head: tuple[Item, ...] = ()  # in the moment before the head's forward, when its parameters arrive
    loss_and_head: tuple[Item, ...] = ()  # in the loss and in the head's backward
    in_loss: tuple[Item, ...] = ()  # beside these in the loss alone
    in_head_backward: tuple[Item, ...] = ()  # and beside these in the head's backward alone
    after_head: tuple[Item, ...] = ()  # in the moment after the head's backward, when its gradients leave
    share_of_head: tuple[Item, ...] = ()  # of these gradients, from then on
    backward_head: tuple[Item, ...] = ()  # from the head's first parameter gradient on
    second_of_head: tuple[Item, ...] = ()  # beside these when a later gradient of the head has just been made
    before_backward: tuple[Item, ...] = ()  # beside these as a layer's backward begins, when the next one is sent for
    before_first_backward: tuple[Item, ...] = ()  # when there is no next one, but its own parameters arrive
    backward_layer: tuple[Item, ...] = ()
    backward_last_layer: tuple[Item, ...] = ()  # the first one that backward reaches
    backward_first_layer: tuple[Item, ...] = ()  # and the last one
    after_layer: tuple[Item, ...] = ()  # in the moment after a layer's backward, when its gradients leave
    after_last_layer: tuple[Item, ...] = ()
    after_first_layer: tuple[Item, ...] = ()
    on_gradient: tuple[Item, ...] = ()  # in the moment in which a parameter's gradient has just been made
    backward_embedding: tuple[Item, ...] = ()
    gradient_of_embedding: tuple[Item, ...] = ()  # beside these when the table's gradient is complete
    after_embedding: tuple[Item, ...] = ()  # in the moment after the embedding's backward
    layer_share: Mapping[bool, Item] = NONE  # of gradients that a layer leaves behind
    layer_gathered: Mapping[bool, Item] = NONE  # parameters that a layer keeps from its forward until its backward


class Buffers(NamedTuple):
    """The communication buffers of a rank, but for those made inside a block (sequence parallelism's are)."""

    steady: tuple[Item, ...] = ()
    around: Around = Around()


def units(parameters: Parameters, size: Callable[[Held], int] = attrgetter("elements")) -> dict[bool, int]:
    """Elements of one layer: of a dense one under False, of one with experts under True; `size`: those of a tensor."""
    found: dict[str, int] = {}
    for held in parameters:
        if held.where == "layer":
            kind = held.module.partition("*")[0]
            found[kind] = found.get(kind, 0) + size(held)
    experts = {held.module.partition("*")[0] for held in parameters if ".experts." in held.module}
    return {kind in experts: elements for kind, elements in found.items()}


def trained_elements(held: Held) -> int:
    """Elements of a tensor's gradient; none of what is frozen."""
    return held.elements if held.trains else 0


def root_unit(parameters: Parameters, size: Callable[[Held], int] = attrgetter("elements")) -> int:
    """Elements of what belongs to no layer: embeddings, final norm, head."""
    return sum(held.count * size(held) for held in parameters if held.where != "layer")


def gradient_share(elements: int, choice: Choice, source: str, dtype: str = "") -> Item:
    """A rank's share of a layer's gradients, once they are reduced; main gradients that always exist need none.

    Args:
        elements: of the layer's gradients.
        choice: of the run.
        source: of the rule.
        dtype: theirs, where it is not that of the weights that forward reads.
    """
    recipe = RECIPES[choice.recipe]
    each = 0
    if recipe.gradients is not None:
        each += DTYPE_BYTES[dtype or choice.base]
        each += DTYPE_BYTES["fp32"] if recipe.main_gradients_live == "backward" else 0
    elements = -(-elements // choice.data_parallel)
    share = buffer("gradient share of a layer", elements, "uint8", 0, "P_layer/N", f"{source}: reduced gradients")
    size = elements * each
    return share._replace(component=Component.GRADIENTS, shape=(size,), each=size, block=rounded(size))


def host_shards(parameters: Parameters, choice: Choice, dtype: str, source: str) -> Item:
    """A rank's shards of a layer that come from the host, one tensor a parameter, until they are gathered."""
    kinds: dict[str, list[int]] = {}
    for held in parameters:
        if held.where == "layer":
            size = DTYPE_BYTES[held.dtype or dtype] * prod(choice.spread(2).shape(held))
            kinds.setdefault(held.module.partition("*")[0], []).append(size)
    sizes = max(kinds.values(), key=sum, default=[])
    shards = buffer("layer's shards from the host", 0, dtype, 0, "P_layer/N", source)
    block = sum(map(rounded, sizes))
    return shards._replace(shape=(sum(sizes) // DTYPE_BYTES[dtype],), each=sum(sizes), block=block)


def buffer(name: str, elements: int, dtype: str, mask: int, symbol: str, citation: str) -> Item:
    """One buffer of an engine."""
    each = elements * DTYPE_BYTES[dtype]
    formula = f"{DTYPE_BYTES[dtype]}·{symbol}"
    component = Component.COMMUNICATION_BUFFERS
    return Item(component, "engine", name, (elements,), dtype, 1, each, rounded(each), mask, formula, citation)
