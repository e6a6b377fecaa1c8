"""Buffers of engines: persistent ones, and those live around the layer that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.states.state_options import StateOptions

NONE: Mapping[bool, RowDraft] = MappingProxyType({})  # by layer type: dense under False, with experts under True


class PerLayerBuffers(NamedTuple):
    """Transient buffers around the layer that runs; the caller sets their masks."""

    forward_layer: tuple[RowDraft, ...] = ()
    forward_widest: tuple[RowDraft, ...] = ()  # for the layer with the largest buffers, if it is not the last
    forward_head: tuple[RowDraft, ...] = ()
    before_layer: tuple[RowDraft, ...] = ()  # before a layer's forward, while its parameters are copied out
    before_first_layer: tuple[RowDraft, ...] = ()
    before_head: tuple[RowDraft, ...] = ()  # before the LM head's forward, while its parameters are copied out
    loss_and_head: tuple[RowDraft, ...] = ()  # in the loss and in the LM head's backward
    in_loss: tuple[RowDraft, ...] = ()  # in addition to `loss_and_head`, in the loss only
    in_head_backward: tuple[RowDraft, ...] = ()  # in addition to `loss_and_head`, in the LM head's backward only
    after_head: tuple[RowDraft, ...] = ()  # after the LM head's backward, while its gradients are reduced
    share_of_head: tuple[RowDraft, ...] = ()  # reduced shard of the LM head's gradients, from then on
    backward_head: tuple[RowDraft, ...] = ()  # from the LM head's first parameter gradient on
    second_of_head: tuple[RowDraft, ...] = ()  # additional, when a later gradient of the LM head was just produced
    before_backward: tuple[
        RowDraft, ...
    ] = ()  # additional, as a layer's backward begins and the next one is prefetched
    # the same without a next layer, while its own parameters are copied out
    before_first_backward: tuple[RowDraft, ...] = ()
    backward_layer: tuple[RowDraft, ...] = ()
    backward_last_layer: tuple[RowDraft, ...] = ()  # the first layer in backward
    backward_first_layer: tuple[RowDraft, ...] = ()  # the last layer in backward
    after_layer: tuple[RowDraft, ...] = ()  # after a layer's backward, while its gradients are reduced
    after_last_layer: tuple[RowDraft, ...] = ()
    after_first_layer: tuple[RowDraft, ...] = ()
    on_gradient: tuple[RowDraft, ...] = ()  # when a parameter's gradient was just produced
    backward_embedding: tuple[RowDraft, ...] = ()
    gradient_of_embedding: tuple[RowDraft, ...] = ()  # additional, when the embedding's gradient is complete
    after_embedding: tuple[RowDraft, ...] = ()  # after the embedding's backward
    layer_share: Mapping[bool, RowDraft] = NONE  # gradient shard that a layer leaves
    layer_gathered: Mapping[bool, RowDraft] = NONE  # parameters that stay gathered from forward to backward


class EngineBuffers(NamedTuple):
    """Communication buffers of a rank, except those allocated inside a block (sequence parallelism's)."""

    steady: tuple[RowDraft, ...] = ()
    around: PerLayerBuffers = PerLayerBuffers()


def units(
    parameters: LocalParameters, size: Callable[[LocalParameter], int] = attrgetter("elements")
) -> dict[bool, int]:
    """Return the elements of one layer, by type: dense under False, with experts under True; `size`: of one tensor."""
    found: dict[str, int] = {}
    for parameter in parameters:
        if parameter.where == "layer":
            kind = parameter.module.partition("*")[0]
            found[kind] = found.get(kind, 0) + size(parameter)
    experts = {parameter.module.partition("*")[0] for parameter in parameters if ".experts." in parameter.module}
    largest: dict[bool, int] = {}  # of layers with linear and with full attention
    for kind, elements in found.items():
        largest[kind in experts] = max(elements, largest.get(kind in experts, 0))
    return largest


def trained_elements(parameter: LocalParameter) -> int:
    """Return the elements of a parameter's gradient; 0 for a frozen parameter."""
    return parameter.elements if parameter.trains else 0


def root_unit(parameters: LocalParameters, size: Callable[[LocalParameter], int] = attrgetter("elements")) -> int:
    """Return the elements outside the layers: embeddings, final norm, LM head."""
    return sum(parameter.count * size(parameter) for parameter in parameters if parameter.where != "layer")


def gradient_share(elements: int, options: StateOptions, source: str, dtype: str = "") -> RowDraft:
    """Return a rank's shard of a layer's reduced gradients; 0 bytes if main gradients always exist.

    Args:
        elements: number of the layer's gradient elements.
        options: options of the run.
        source: source of the rule.
        dtype: dtype of the gradients, where it differs from that of the weights that forward reads.
    """
    recipe = RECIPES[options.recipe]
    each = 0
    if recipe.gradients is not None:
        each += DTYPE_BYTES[dtype or options.base]
        each += DTYPE_BYTES["fp32"] if recipe.main_gradients_live == "backward" else 0
    elements = -(-elements // options.data_parallel)
    share = buffer("gradient shard of a layer", elements, "uint8", 0, "P_layer/N", f"{source}: reduced gradients")
    size = elements * each
    return share._replace(component=Component.GRADIENTS, shape=(size,), each=size, block=rounded(size))


def host_shards(parameters: LocalParameters, options: StateOptions, dtype: str, source: str) -> RowDraft:
    """Return the device copies of a layer's offloaded shards, one tensor per parameter, live until the all-gather."""
    kinds: dict[str, list[int]] = {}
    for parameter in parameters:
        if parameter.where == "layer":
            size = DTYPE_BYTES[parameter.dtype or dtype] * prod(options.spread(2).shape(parameter))
            kinds.setdefault(parameter.module.partition("*")[0], []).append(size)
    sizes = max(kinds.values(), key=sum, default=[])
    shards = buffer("layer's shards from the host", 0, dtype, 0, "P_layer/N", source)
    block = sum(map(rounded, sizes))
    return shards._replace(shape=(sum(sizes) // DTYPE_BYTES[dtype],), each=sum(sizes), block=block)


def buffer(name: str, elements: int, dtype: str, mask: int, symbol: str, citation: str) -> RowDraft:
    """Return one buffer of an engine."""
    each = elements * DTYPE_BYTES[dtype]
    formula = f"{DTYPE_BYTES[dtype]}·{symbol}"
    component = Component.COMMUNICATION_BUFFERS
    return RowDraft(component, "engine", name, (elements,), dtype, 1, each, rounded(each), mask, formula, citation)
