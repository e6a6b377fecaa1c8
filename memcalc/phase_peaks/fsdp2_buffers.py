"""FSDP2 (torch torch/distributed/fsdp/_fully_shard/): one unit per layer, and the root with all other parameters.

A unit's parameters are all-gathered into one buffer and copied out of it. Python references hold the buffers, so the
order is fixed. In forward a buffer is live until the next unit's copy-out. In backward it is freed after its own
copy-out, and the next one is gathered at once. Gradients are copied into the input of a reduce-scatter, which is live
until the next input is allocated.

Shards are rows of the first axis, equally many on each rank. Gathered and reduced buffers hold all padded shards. They
exceed the parameter where the rows do not divide, many times so where there are fewer rows than ranks (experts).

With CPUOffloadPolicy the shards are in host memory. Each parameter's shard is copied to the device for the all-gather
and freed once that has started; each reduced gradient is moved to the host at once.
"""

from __future__ import annotations

from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.row_drafts import RowDraft
from memcalc.phase_peaks.layer_buffers import (
    EngineBuffers,
    PerLayerBuffers,
    buffer,
    gradient_share,
    host_shards,
    root_unit,
    units,
)
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.state_options import StateOptions

SOURCE = "torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param_group.py"
HOLDS_BOTH_INPUTS = (2, 12)  # the torch version that frees a reduce-scatter's input only when the next one exists
PARAM = "torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py"

# buffers during which the root's parameters are gathered
BESIDE_ROOT = (
    *("forward_layer", "forward_head", "before_layer", "before_first_layer", "loss_and_head"),
    *("backward_layer", "backward_last_layer", "backward_first_layer", "backward_embedding"),
    *("after_layer", "after_last_layer", "after_first_layer"),
)


class FsdpUnit(NamedTuple):
    """Parameters that are gathered and reduced together: a layer, or the root.

    Args:
        symbol: its parameters in formulas.
        gathered: bytes of all ranks' shards of its parameters.
        dtype: dtype of the all-gather buffer: the parameters' own, or uint8 where they have several.
        elements: number of gradient elements that are reduced.
        reduced: dtype of the reduce-scatter.
        sharded: dtype of the gradient shards, that of the parameters.
    """

    symbol: str
    gathered: int
    dtype: str
    elements: int
    reduced: str
    sharded: str

    def gather(self, name: str, detail: str) -> RowDraft:
        """Return an all-gather buffer of its parameters."""
        elements = self.gathered // DTYPE_BYTES[self.dtype]
        found = buffer(name, elements, self.dtype, 0, self.symbol, f"{SOURCE}: {detail}")
        # _fsdp_collectives.py, _get_all_gather_input_metadatas: one uint8 buffer for several dtypes
        return found._replace(formula=f"{self.symbol}, each in its own dtype") if self.dtype == "uint8" else found

    def scatter(self, name: str) -> tuple[RowDraft, ...]:
        """Return the input of its reduce-scatter, if it has gradients."""
        if not self.elements:
            return ()
        return (buffer(name, self.elements, self.reduced, 0, self.symbol, f"{SOURCE}: post_backward"),)


class Units(NamedTuple):
    """The FSDP units of a model.

    Args:
        layers: a dense layer under False, one with experts under True.
        embedding: the embedding, where it is a unit; else an empty unit.
        tail: final norm and LM head, where they are a unit; else an empty unit.
        root: all other parameters.
    """

    layers: dict[bool, FsdpUnit]
    embedding: FsdpUnit
    tail: FsdpUnit
    root: FsdpUnit


def gathered_dtype(parameter: LocalParameter, options: StateOptions) -> str:
    """Return a parameter's all-gather dtype: uint8 for torchao's FP8 weights, else the policy's, else its own."""
    if is_narrow(parameter, options):
        return "uint8"
    packed = parameter.dtype == "uint8"  # 4-bit weights, which no policy casts
    return parameter.dtype if packed else options.gathered or parameter.dtype or options.base


def units_of(parameters: LocalParameters, options: StateOptions) -> Units:
    """Return the units with the sizes of their all-gather and reduce-scatter.

    A mixed-precision policy sets the dtypes of both; otherwise both use the stored dtype, which may be wider for
    adapters than for frozen parameters. torchao's FP8 weights are gathered in 8 bits.
    """
    spread = options.spread(2)

    def dtype(parameter: LocalParameter) -> str:
        return gathered_dtype(parameter, options)

    def padded(parameter: LocalParameter) -> int:
        """Return the elements of all ranks' shards of a tensor, with rows rounded up on every rank."""
        return prod(spread.shape(parameter)) * spread.over(parameter)

    def gathered(parameter: LocalParameter) -> int:
        return padded(parameter) * DTYPE_BYTES[dtype(parameter)]

    def trained(parameter: LocalParameter) -> int:
        return padded(parameter) if parameter.trains else 0

    def unit(symbol: str, size: int, elements: int, members: list[LocalParameter]) -> FsdpUnit:
        dtypes = {dtype(held) for held in members}
        # FSDP2 rejects gradients of several dtypes (_fsdp_param_group.py, _init_mp_dtypes).
        own = next((parameter.dtype or options.base for parameter in members if parameter.trains), options.base)
        gathered = dtypes.pop() if len(dtypes) == 1 else "uint8"
        return FsdpUnit(symbol, size, gathered, elements, options.reduced or own, own)

    def end(symbol: str, members: list[LocalParameter]) -> FsdpUnit:
        found = LocalParameters(members)
        return unit(symbol, root_unit(found, gathered), root_unit(found, trained), members)

    layers = [parameter for parameter in parameters if parameter.where == "layer"]
    others = [parameter for parameter in parameters if parameter.where != "layer"]
    elements = units(parameters, trained)
    kinds = {kind: unit("P_layer", size, elements[kind], layers) for kind, size in units(parameters, gathered).items()}
    embedding, tail = [], []
    if options.wraps_embedding_and_head:
        embedding = [held for held in others if is_embedding(held)]
        tail = [parameter for parameter in others if parameter.where == "head"]
    rest = [held for held in others if held not in embedding and held not in tail]
    return Units(kinds, end("P_embedding", embedding), end("P_tail", tail), end("P_root", rest))


def is_embedding(parameter: LocalParameter) -> bool:
    """Return whether a parameter is the embedding's, a separate unit with `wraps_embedding_and_head`."""
    return parameter.where == "embedding" and parameter.module.partition(".")[0] == "embed_tokens"


class LargestLayerBuffers(NamedTuple):
    """Buffers of the largest layer.

    Args:
        own: its gathered parameters.
        arriving: the all-gather of the next layer.
        before: the all-gather buffer of the previous layer.
        scattered: the reduce-scatter input of the previous layer in backward.
        leaving: its own reduce-scatter input.
    """

    own: RowDraft
    arriving: RowDraft
    before: RowDraft
    scattered: tuple[RowDraft, ...]
    leaving: tuple[RowDraft, ...]


def fsdp2(parameters: LocalParameters, options: StateOptions) -> EngineBuffers:
    """Return the gathered parameters and reduce-scatter inputs of one stage.

    Stage 3 is reshard_after_forward=True: a layer's parameters are gathered again in backward. Stage 2 is False: they
    stay gathered. The root's parameters always stay gathered.
    """
    units = units_of(parameters, options)
    layers, root = units.layers, units.root
    widest = max(layers.values(), key=attrgetter("gathered"), default=root._replace(gathered=0, elements=0))
    own, arriving, before, scattered, leaving = layer = LargestLayerBuffers(
        widest.gather("layer parameters, gathered", "unshard"),
        widest.gather("all-gather of a layer", "prefetch"),
        widest.gather("all-gather of the layer before", "its buffer lives until this copy-out"),
        widest.scatter("reduce-scatter input of the last layer"),
        widest.scatter("reduce-scatter input of a layer"),
    )
    root_gather = root.gather("all-gather of the root", "unshard")
    root_scatter = root.scatter("reduce-scatter input of the root")
    both = scattered if options.torch[:2] == HOLDS_BOTH_INPUTS else ()
    layer_buffers = PerLayerBuffers(
        backward_layer=scattered,
        backward_first_layer=scattered,
        after_layer=(*leaving, *both),
        after_last_layer=leaving,
        after_first_layer=(*leaving, *both),
        backward_embedding=scattered,
        # as for a layer: its parameters are freed before its gradients are reduced
        after_embedding=(*root_scatter, *both),
        layer_share={kind: _left_behind(unit, options) for kind, unit in layers.items()},
    )
    if options.gathers_last_layer_once:
        layer_buffers = layer_buffers._replace(loss_and_head=(own,))
    if options.zero_stage < 3:
        keep = {kind: unit.gather("layer parameters, gathered", "not resharded") for kind, unit in layers.items()}
        layer_buffers = layer_buffers._replace(
            forward_layer=(arriving,),
            forward_head=(arriving,),
            before_layer=(before, arriving),
            before_first_layer=(root_gather, arriving),
            layer_gathered=keep,
        )
    else:
        sent_for = host_shards(parameters, options, options.gathered or options.base, f"{PARAM}: all_gather_inputs")
        layer_buffers = layer_buffers._replace(
            forward_layer=(own, arriving),
            forward_head=(own, arriving) if options.gathers_last_layer_once else (arriving,),
            before_layer=(own, before, arriving),
            before_first_layer=(own, root_gather, arriving),
            backward_layer=(own, arriving, *scattered),
            backward_last_layer=(own, arriving),
            backward_first_layer=(own, *scattered),
            after_layer=(arriving, *leaving, *both),
            after_last_layer=(arriving, *leaving),
            before_backward=(sent_for,) if options.weights_on_host else (),
            before_first_backward=(arriving,),
            in_head_backward=(arriving,) if options.loss_in_model else (),
        )
    if options.wraps_embedding_and_head:
        layer_buffers = _with_ends(layer_buffers, units, layer, options)
    return EngineBuffers((), _beside_root(layer_buffers, root) if root.gathered else layer_buffers)


def _with_ends(
    layer_buffers: PerLayerBuffers, units: Units, layer: LargestLayerBuffers, options: StateOptions
) -> PerLayerBuffers:
    """Return the buffers where the embedding is a unit, and final norm and LM head are another.

    Sources: Accelerate 1.15 utils/fsdp_utils.py, fsdp2_prepare_model; torchtitan 0.2.2 models/llama3/infra/
    parallelize.py, apply_fsdp. Final norm and LM head are not resharded after forward. Their gradients are reduced as
    soon as their backward has ended, those of the embedding with the root's.
    """
    embedding, tail, gathers_again = units.embedding, units.tail, options.zero_stage > 2
    table = embedding.gather("embedding, gathered", "unshard")
    table_arrives = embedding.gather("all-gather of the embedding", "its buffer lives until the next copy-out")
    head = tail.gather("final norm and head, gathered", "not resharded after forward")
    head_arrives = tail.gather("all-gather of final norm and head", "freed when the root's forward has ended")
    of_head = tail.scatter("reduce-scatter input of final norm and head")
    both = options.torch[:2] == HOLDS_BOTH_INPUTS
    own, prefetched, stays = ((layer.own,), (layer.arriving,), ()) if gathers_again else ((), (), (table,))
    # When the first layer's backward begins, its own parameters are copied out; then the embedding's are prefetched.
    beside_first = (max(table_arrives, layer.arriving, key=attrgetter("each")),) if gathers_again else stays
    return layer_buffers._replace(
        before_first_layer=(*own, *stays, table_arrives, layer.arriving),
        forward_layer=(*own, *stays, layer.arriving),
        before_layer=(*own, *stays, layer.before, layer.arriving),
        forward_head=(head, *stays, head_arrives),
        before_head=(head, *stays, layer.arriving, head_arrives),
        loss_and_head=(head, *stays),
        in_loss=(head_arrives,) if options.loss_in_model else (),
        in_head_backward=prefetched if options.loss_in_model else (),
        backward_head=() if options.loss_in_model else prefetched,
        after_head=(*stays, *prefetched, *of_head),
        share_of_head=(_share(tail, options, "gradient shard of final norm and head"),),
        backward_layer=(*own, *stays, *prefetched, *layer.scattered),
        backward_last_layer=(*own, *stays, *prefetched, *of_head),
        backward_first_layer=(*own, *beside_first, *layer.scattered),
        after_layer=(*stays, *prefetched, *layer.leaving, *(layer.scattered if both else ())),
        after_last_layer=(*stays, *prefetched, *layer.leaving, *(of_head if both else ())),
        after_first_layer=(*beside_first, *layer.leaving, *(layer.scattered if both else ())),
        before_first_backward=(),
        backward_embedding=(table, *layer.scattered),
        after_embedding=(
            *embedding.scatter("reduce-scatter input of the embedding"),
            *(layer.scattered if both else ()),
        ),
    )


def is_narrow(parameter: LocalParameter, options: StateOptions) -> bool:
    """Return whether a weight is gathered in FP8 (torchao's fsdp_pre_all_gather)."""
    if options.float8_gather is None or parameter.tensor != "weight" or len(parameter.shape) != len(("out", "in")):
        return False
    return not parameter.module.startswith("embed") and options.float8_gather.converts(parameter.module)


def _beside_root(layer_buffers: PerLayerBuffers, root: FsdpUnit) -> PerLayerBuffers:
    """Add the root's parameters, gathered from the first layer's copy-out until the root's gradients are reduced."""
    stays = root.gather("root parameters, gathered", "the root is not resharded")
    there: dict[str, Any] = {name: (stays, *getattr(layer_buffers, name)) for name in BESIDE_ROOT}
    for name in ("before_head", "after_head"):  # where the LM head is a unit
        if found := getattr(layer_buffers, name):
            there[name] = (stays, *found)
    return layer_buffers._replace(**there)


def _left_behind(unit: FsdpUnit, options: StateOptions) -> RowDraft:
    """Return what a layer's backward leaves on the device until the model's backward has ended.

    Its gradient shard; nothing with offloaded weights, except the all-reduced gradients under HSDP.
    """
    share = _share(unit, options)
    if not options.weights_on_host:
        return share
    if not options.replicates:
        return share._replace(each=0, block=0)
    elements = -(-unit.elements // options.data_parallel)
    detail = f"{SOURCE}: _all_reduce_state"
    return buffer("all-reduced gradients of a layer", elements, unit.reduced, 0, "P_layer/N", detail)


def _share(unit: FsdpUnit, options: StateOptions, name: str = "") -> RowDraft:
    """Return a rank's shard of a unit's gradients."""
    share = gradient_share(unit.elements, options, SOURCE, unit.sharded)
    return share._replace(tensor=name, formula=share.formula.replace("P_layer", unit.symbol)) if name else share
