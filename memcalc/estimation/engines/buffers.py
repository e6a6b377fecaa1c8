"""Buffers of engines: persistent ones, and those live around the layer that runs."""

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

NONE: Mapping[bool, Item] = MappingProxyType({})  # by layer type: dense under False, with experts under True


class Around(NamedTuple):
    """Transient buffers around the layer that runs; the caller sets their masks."""

    forward_layer: tuple[Item, ...] = ()
    forward_widest: tuple[Item, ...] = ()  # for the layer with the largest buffers, if it is not the last
    forward_head: tuple[Item, ...] = ()
    before_layer: tuple[Item, ...] = ()  # before a layer's forward, while its parameters are copied out
    before_first_layer: tuple[Item, ...] = ()
    before_head: tuple[Item, ...] = ()  # before the LM head's forward, while its parameters are copied out
    loss_and_head: tuple[Item, ...] = ()  # in the loss and in the LM head's backward
    in_loss: tuple[Item, ...] = ()  # in addition to `loss_and_head`, in the loss only
    in_head_backward: tuple[Item, ...] = ()  # in addition to `loss_and_head`, in the LM head's backward only
    after_head: tuple[Item, ...] = ()  # after the LM head's backward, while its gradients are reduced
    share_of_head: tuple[Item, ...] = ()  # reduced shard of the LM head's gradients, from then on
    backward_head: tuple[Item, ...] = ()  # from the LM head's first parameter gradient on
    second_of_head: tuple[Item, ...] = ()  # additional, when a later gradient of the LM head was just produced
    before_backward: tuple[Item, ...] = ()  # additional, as a layer's backward begins and the next one is prefetched
    # the same without a next layer, while its own parameters are copied out
    before_first_backward: tuple[Item, ...] = ()
    backward_layer: tuple[Item, ...] = ()
    backward_last_layer: tuple[Item, ...] = ()  # the first layer in backward
    backward_first_layer: tuple[Item, ...] = ()  # the last layer in backward
    after_layer: tuple[Item, ...] = ()  # after a layer's backward, while its gradients are reduced
    after_last_layer: tuple[Item, ...] = ()
    after_first_layer: tuple[Item, ...] = ()
    on_gradient: tuple[Item, ...] = ()  # when a parameter's gradient was just produced
    backward_embedding: tuple[Item, ...] = ()
    gradient_of_embedding: tuple[Item, ...] = ()  # additional, when the embedding's gradient is complete
    after_embedding: tuple[Item, ...] = ()  # after the embedding's backward
    layer_share: Mapping[bool, Item] = NONE  # gradient shard that a layer leaves
    layer_gathered: Mapping[bool, Item] = NONE  # parameters that stay gathered from forward to backward


class Buffers(NamedTuple):
    """Communication buffers of a rank, except those allocated inside a block (sequence parallelism's)."""

    steady: tuple[Item, ...] = ()
    around: Around = Around()


def units(parameters: Parameters, size: Callable[[Held], int] = attrgetter("elements")) -> dict[bool, int]:
    """Return the elements of one layer, by type: dense under False, with experts under True; `size`: of one tensor."""
    found: dict[str, int] = {}
    for held in parameters:
        if held.where == "layer":
            kind = held.module.partition("*")[0]
            found[kind] = found.get(kind, 0) + size(held)
    experts = {held.module.partition("*")[0] for held in parameters if ".experts." in held.module}
    largest: dict[bool, int] = {}  # of layers with linear and with full attention
    for kind, elements in found.items():
        largest[kind in experts] = max(elements, largest.get(kind in experts, 0))
    return largest


def trained_elements(held: Held) -> int:
    """Return the elements of a parameter's gradient; 0 for a frozen parameter."""
    return held.elements if held.trains else 0


def root_unit(parameters: Parameters, size: Callable[[Held], int] = attrgetter("elements")) -> int:
    """Return the elements outside the layers: embeddings, final norm, LM head."""
    return sum(held.count * size(held) for held in parameters if held.where != "layer")


def gradient_share(elements: int, choice: Choice, source: str, dtype: str = "") -> Item:
    """Return a rank's shard of a layer's reduced gradients; 0 bytes if main gradients always exist.

    Args:
        elements: number of the layer's gradient elements.
        choice: options of the run.
        source: source of the rule.
        dtype: dtype of the gradients, where it differs from that of the weights that forward reads.
    """
    recipe = RECIPES[choice.recipe]
    each = 0
    if recipe.gradients is not None:
        each += DTYPE_BYTES[dtype or choice.base]
        each += DTYPE_BYTES["fp32"] if recipe.main_gradients_live == "backward" else 0
    elements = -(-elements // choice.data_parallel)
    share = buffer("gradient shard of a layer", elements, "uint8", 0, "P_layer/N", f"{source}: reduced gradients")
    size = elements * each
    return share._replace(component=Component.GRADIENTS, shape=(size,), each=size, block=rounded(size))


def host_shards(parameters: Parameters, choice: Choice, dtype: str, source: str) -> Item:
    """Return the device copies of a layer's offloaded shards, one tensor per parameter, live until the all-gather."""
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
    """Return one buffer of an engine."""
    each = elements * DTYPE_BYTES[dtype]
    formula = f"{DTYPE_BYTES[dtype]}·{symbol}"
    component = Component.COMMUNICATION_BUFFERS
    return Item(component, "engine", name, (elements,), dtype, 1, each, rounded(each), mask, formula, citation)
