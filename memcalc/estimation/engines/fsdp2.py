"""FSDP2 (torch torch/distributed/fsdp/_fully_shard/): one unit a layer, and the root, which has all the rest.

A unit's parameters are gathered into one buffer and copied out of it. Python's references hold the buffers, so the
order is fixed: in forward a buffer lives until the next unit's copy-out; in backward it goes after its own copy-out,
and the next one is gathered at once. Gradients are copied into the input of a reduce-scatter, which lives until the
next one is made.

Shares are rows of the first axis, as many on each rank: what is gathered and reduced is as large as all shares, which
is more than the parameter where rows do not divide, and many times that where there are fewer than ranks (experts).

With CPUOffloadPolicy the shards are the host's: each parameter's is copied to the device for the all-gather and let go
when that is under way, and each reduced gradient leaves for the host at once.
"""

from __future__ import annotations

from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from memcalc.estimation.choice import Choice
from memcalc.estimation.engines.buffers import (
    Around,
    Buffers,
    buffer,
    gradient_share,
    host_shards,
    root_unit,
    units,
)
from memcalc.estimation.items import Item
from memcalc.estimation.sharding import Held, Parameters
from memcalc.spec.recipes import DTYPE_BYTES

SOURCE = "torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param_group.py"
PARAM = "torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py"

# The moments of a step around which the root's parameters are there.
BESIDE_ROOT = (
    *("forward_layer", "forward_head", "before_layer", "before_first_layer", "loss_and_head"),
    *("backward_layer", "backward_last_layer", "backward_first_layer", "backward_embedding"),
    *("after_layer", "after_last_layer", "after_first_layer"),
)


class Unit(NamedTuple):
    """What is gathered and reduced at once: a layer, or the root.

    Args:
        symbol: its parameters in formulas.
        gathered: bytes of all ranks' shares of its parameters.
        dtype: that of the buffer they are gathered in: their own, or bytes where they have several.
        elements: of those gradients that are reduced.
        reduced: the dtype in which they are.
    """

    symbol: str
    gathered: int
    dtype: str
    elements: int
    reduced: str

    def gather(self, name: str, detail: str) -> Item:
        """A buffer of its parameters."""
        elements = self.gathered // DTYPE_BYTES[self.dtype]
        found = buffer(name, elements, self.dtype, 0, self.symbol, f"{SOURCE}: {detail}")
        # _fsdp_collectives.py, _get_all_gather_input_metadatas: one of bytes for several dtypes
        return found._replace(formula=f"{self.symbol}, each in its own dtype") if self.dtype == "uint8" else found

    def scatter(self, name: str) -> tuple[Item, ...]:
        """The input of its reduce-scatter, if it has gradients."""
        if not self.elements:
            return ()
        return (buffer(name, self.elements, self.reduced, 0, self.symbol, f"{SOURCE}: post_backward"),)


def units_of(parameters: Parameters, choice: Choice) -> tuple[dict[bool, Unit], Unit]:
    """A dense layer under False, one with experts under True; and the root.

    With a mixed-precision policy units are gathered in the compute dtype and reduced in fp32; else both in the dtype
    that parameters are held in: those of adapters may be wider than those that are frozen. torchao's are in 8 bits.
    """
    spread = choice.spread(2)
    usual = choice.compute if choice.mixed_policy else choice.base

    def dtype(held: Held) -> str:
        return "uint8" if is_narrow(held, choice) else held.dtype or usual

    def padded(held: Held) -> int:
        """What all ranks' shares of a tensor come to: rows that do not divide are rounded up, for every rank."""
        return prod(spread.shape(held)) * spread.over(held)

    def gathered(held: Held) -> int:
        return padded(held) * DTYPE_BYTES[dtype(held)]

    def trained(held: Held) -> int:
        return padded(held) if held.trains else 0

    def unit(symbol: str, size: int, elements: int, members: list[Held]) -> Unit:
        dtypes = {dtype(held) for held in members}
        reduced = {held.dtype or usual for held in members if held.trains}
        return Unit(
            symbol,
            size,
            dtypes.pop() if len(dtypes) == 1 else "uint8",
            elements,
            # FSDP2 refuses gradients of several dtypes (_fsdp_param_group.py, _init_mp_dtypes).
            "fp32" if choice.mixed_policy else next(iter(reduced), usual),
        )

    layers = [held for held in parameters if held.where == "layer"]
    others = [held for held in parameters if held.where != "layer"]
    elements = units(parameters, trained)
    kinds = {kind: unit("P_layer", size, elements[kind], layers) for kind, size in units(parameters, gathered).items()}
    return kinds, unit("P_root", root_unit(parameters, gathered), root_unit(parameters, trained), others)


def fsdp2(parameters: Parameters, choice: Choice) -> Buffers:
    """Gathered parameters and reduce-scatter inputs of one stage.

    Stage 3 is reshard_after_forward=True, where a layer's parameters are gathered again in backward; stage 2 is False,
    where they stay. The root's stay either way.
    """
    layers, root = units_of(parameters, choice)
    widest = max(layers.values(), key=attrgetter("gathered"), default=root._replace(gathered=0, elements=0))
    own = widest.gather("layer parameters, gathered", "unshard")
    arriving = widest.gather("all-gather of a layer", "prefetch")
    before = widest.gather("all-gather of the layer before", "its buffer lives until this copy-out")
    scattered = widest.scatter("reduce-scatter input of the last layer")
    leaving = widest.scatter("reduce-scatter input of a layer")
    root_gather = root.gather("all-gather of the root", "unshard")
    root_scatter = root.scatter("reduce-scatter input of the root")
    stays = root.gather("root parameters, gathered", "the root is not resharded")
    # torch 2.12 lets the last input go only after the next one exists; all others before.
    both = scattered if choice.torch[:2] == (2, 12) else ()
    around = Around(
        backward_layer=scattered,
        backward_first_layer=scattered,
        after_layer=(*leaving, *both),
        after_last_layer=leaving,
        after_first_layer=(*leaving, *both),
        backward_embedding=scattered,
        after_embedding=(*root_scatter, *both),  # as of a layer: its parameters are let go before
        layer_share={kind: _left_behind(unit, choice) for kind, unit in layers.items()},
    )
    if choice.mixed_policy:  # torchtitan does not reshard the last layer, which would be gathered at once again
        around = around._replace(loss_and_head=(own,))
    usual = choice.compute if choice.mixed_policy else choice.base
    sent_for = host_shards(parameters, choice, usual, f"{PARAM}: all_gather_inputs")
    if choice.zero_stage < 3:
        keep = {kind: unit.gather("layer parameters, gathered", "not resharded") for kind, unit in layers.items()}
        around = around._replace(
            forward_layer=(arriving,),
            forward_head=(arriving,),
            before_layer=(before, arriving),
            before_first_layer=(root_gather, arriving),
            layer_gathered=keep,
        )
        return Buffers((), _beside_root(around, stays))
    around = around._replace(
        forward_layer=(own, arriving),
        forward_head=(own, arriving) if choice.mixed_policy else (arriving,),
        before_layer=(own, before, arriving),
        before_first_layer=(own, root_gather, arriving),
        backward_layer=(own, arriving, *scattered),
        backward_last_layer=(own, arriving),
        backward_first_layer=(own, *scattered),
        after_layer=(arriving, *leaving, *both),
        after_last_layer=(arriving, *leaving),
        before_backward=(sent_for,) if choice.weights_on_host else (),
        before_first_backward=(arriving,),
    )
    return Buffers((), _beside_root(around, stays))


def is_narrow(held: Held, choice: Choice) -> bool:
    """Whether a weight is gathered in 8 bits (torchao's fsdp_pre_all_gather)."""
    if choice.narrow_gather is None or held.tensor != "weight" or len(held.shape) != len(("out", "in")):
        return False
    return not held.module.startswith("embed") and choice.narrow_gather.converts(held.module)


def _beside_root(around: Around, root: Item) -> Around:
    """The root's parameters beside all others, from the first layer's arrival until the root's own gradients leave."""
    there: dict[str, Any] = {name: (root, *getattr(around, name)) for name in BESIDE_ROOT}
    return around._replace(**there)


def _left_behind(unit: Unit, choice: Choice) -> Item:
    """What a layer's backward leaves on the device until that of the model has ended.

    Its share of the gradients; of those that go to the host nothing, but under HSDP what the groups have added up.
    """
    own = choice.base if choice.mixed_policy else unit.reduced
    share = gradient_share(unit.elements, choice, SOURCE, own)
    if not choice.weights_on_host:
        return share
    if not choice.replicates:
        return share._replace(each=0, block=0)
    elements = -(-unit.elements // choice.data_parallel)
    detail = f"{SOURCE}: _all_reduce_state"
    return buffer("all-reduced gradients of a layer", elements, unit.reduced, 0, "P_layer/N", detail)
