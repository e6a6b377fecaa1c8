"""Allocations before the first step, in order: the model, its copies, the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from math import prod

from memcalc.layout.adapters import adapters_of, base_dtype
from memcalc.layout.local_parameters import LocalParameter, LocalParameters, stage_parameters
from memcalc.layout.parameters import layer_prefixes
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, from_phase, mask_of
from memcalc.sharding.engine import ROOT, by_unit, is_embedding, is_output
from memcalc.simulation.initial_tensors import InitialTensor, InitialTensors
from memcalc.simulation.megatron_construction import built_by_megatron
from memcalc.simulation.quantization import in_4_bits, loaded_in_4_bits
from memcalc.spec.model_families.conversion import family_buffers
from memcalc.spec.programs import OF_TRANSFORMERS, TRL, is_before
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states.flat_states import flattens, unit_of
from memcalc.states.optimizers.parameter_order import in_order
from memcalc.states.parameter_copies import ParameterCopy, Role
from memcalc.states.persistent import CAUSAL_MASKS, ROTARY_TABLES, persistent_rows, registered_buffers
from memcalc.states.recipe_copies import is_made_in_backward, kept_copies
from memcalc.states.state_options import StateOptions, groups, state_options
from memcalc.states.unsharded_weights import shards_loaded_model

WARMS_UP = "4.50"  # of transformers: the first release with caching_allocator_warmup
MAPS = "0.26"  # of TRL: the first release that loads with device_map="auto"
SAMPLES_AGAIN = (2, 13)  # the torch version in which trunc_normal_ samples values beyond the bounds again


def built_before_training(spec: Spec, stage: Stage, options: StateOptions) -> Iterator[InitialTensors]:
    """Yield weights and buffers in the order of module construction, then the recipe's copies, and the batch.

    Workspaces are allocated by the operators that need them, gradients in backward, logits in forward.
    """
    parameters = stage_parameters(spec, stage)
    ordered = tuple(in_order(parameters, options.update.family, layer_prefixes(spec.model, stage.numbers)))
    copies = _copies_of(parameters, options)
    yield from _warmup(spec, ordered, options)
    # Workspaces and logits are allocated by the passes.
    later = (Component.LIBRARY_WORKSPACE, Component.LOGITS_AND_LOSS)
    standing = [item for item in persistent_rows(spec, stage, None) if item.component not in later]
    buffers = _Buffers(spec, [item for item in standing if item.component is not Component.INPUTS])
    if options.engine == "megatron":  # its engine allocates the copies, its modules their buffers
        yield from built_by_megatron(ordered, options)
        yield from (_alone(item) for item in standing if item.component is Component.INPUTS)
        return
    if options.engine == "fsdp2" and options.weights_on_host:
        yield from (_alone(item) for item in standing)
        return
    if flattens(options):
        units = by_unit([each for each in ordered if not each.beside], stage.numbers)
        yield from _flattened(units, [item for item in standing if item.component is Component.WEIGHTS], options)
        yield from _kept_copies(ordered, copies, options)
        yield from (_alone(item) for item in standing if item.component is Component.INPUTS)
        return
    if shards_loaded_model(spec):
        yield from _sharded_afterwards(spec, ordered, copies, options)
        yield from _kept_copies(ordered, copies, options)
        yield from (_alone(item) for item in standing)
        return
    if is_built_on_meta(spec):
        weights = _joined(chain.from_iterable(_sized(ordered, copies, options, Role.WEIGHTS)))
        yield from _given_memory(spec, ordered, weights)
        if spec.training.implementation == "torchtitan" and spec.training.torch >= SAMPLES_AGAIN:
            yield from _sampled(ordered, options)
        yield from _kept_copies(ordered, copies, options)
        yield from (_alone(item) for item in standing)
        return
    base = tuple(held for held in ordered if not _is_adapter(held))
    sized = _sized(base, copies, options, Role.WEIGHTS)
    weights = _joined(buffers.among(base, sized if spec.training.qlora is None else in_4_bits(spec, base, sized)))
    if _casts_weights(spec):
        weights = (_cast_from_fp32(built, options) for built in weights)
    splits = options.partitions_gradients and options.zero_stage == 3
    yield from chain.from_iterable(_split_at_once(built, options) for built in weights) if splits else weights
    yield from _adapters(spec, [held for held in ordered if _is_adapter(held)], copies, options)
    if not options.partitions_gradients:  # DeepSpeed's engine allocates its flat buffers itself
        yield from _kept_copies(ordered, copies, options)
    yield from (_alone(item) for item in standing if item.component is Component.INPUTS)


def _casts_weights(spec: Spec) -> bool:
    """Return whether the weights move to the GPU in fp32 and are cast there: modules are constructed in fp32.

    transformers constructs them in the dtype of the weights, and Lightning casts them before they move.
    """
    training = spec.training
    return training.framework == "loop" and training.implementation == "plain" and training.recipe == "pure"


def _cast_from_fp32(built: InitialTensors, options: StateOptions) -> InitialTensors:
    """Return weights as nn.Module.to casts them, one at a time."""
    wide = (each.size * DTYPE_BYTES["fp32"] // DTYPE_BYTES[options.base] for each in built.tensors)
    return built._replace(replaced=tuple(map(InitialTensor, wide)))


def _warmup(spec: Spec, ordered: Sequence[LocalParameter], options: StateOptions) -> Iterator[InitialTensors]:
    """Yield one allocation of all weights, freed at once, where transformers loads a model on the GPU.

    The weights are then allocated from its segment. transformers 5.23 modeling_utils.py, caching_allocator_warmup:
    with a device map, which bitsandbytes needs, and TRL's programs set on one GPU (trl 1.16 trainer/utils.py,
    create_model_from_path).
    """
    training = spec.training
    quantizes = training.finetune == "qlora" and training.framework in OF_TRANSFORMERS
    maps = spec.parallelism.ranks == 1 and training.framework in TRL and not is_before(training.versions, "trl", MAPS)
    if not (quantizes or maps) or is_before(training.versions, "transformers", WARMS_UP):
        return
    size = 0
    for _, found in groupby(ordered, key=lambda held: held.module):
        first, *rest = found  # what quantization adds to a 4-bit matrix follows it
        loaded = [] if _is_adapter(first) else [first, *(held for held in rest if not held.beside)]
        size += sum(DTYPE_BYTES[held.dtype or options.base] * held.elements for held in loaded)
    yield InitialTensors(mask_of("model"), (InitialTensor(size, stays=False, component=Component.TEMPORARIES),))


def loaded_model(spec: Spec, stage: Stage, options: StateOptions) -> Iterator[InitialTensors]:
    """Yield the weights of a loaded model in registration order, then its buffers.

    from_pretrained builds modules on the meta device, and allocates each weight when it is loaded. Tied weights are
    allocated once.
    """
    parameters = stage_parameters(spec, stage)
    ordered = tuple(in_order(parameters, options.update.family, layer_prefixes(spec.model, stage.numbers)))
    weights = _sized(ordered, _copies_of(parameters, options), options, Role.WEIGHTS)
    yield from _joined(chain.from_iterable(weights))
    buffers = registered_buffers(spec, stage)
    yield from (_alone(item) for item in buffers if item.component is Component.WEIGHTS)


def is_built_on_meta(spec: Spec) -> bool:
    """Return whether modules are built on the meta device, and get memory once they are sharded (FSDP2, DTensor)."""
    parallelism = spec.parallelism
    sharded = parallelism.engine == "fsdp2" and parallelism.zero_stage > 0
    return (sharded or parallelism.tensor_parallel > 1) and spec.training.finetune != "qlora"


def _sharded_afterwards(
    spec: Spec,
    ordered: Sequence[LocalParameter],
    copies: dict[LocalParameter, list[ParameterCopy]],
    options: StateOptions,
) -> Iterator[InitialTensors]:
    """Yield a 4-bit base and its adapters as they are loaded on the GPU, then their shards.

    The unsharded weights stay until all units are sharded: see `unsharded_weights`.
    """
    alone = options._replace(data_parallel=1, expert_shards=1)
    base = [held for held in ordered if not _is_adapter(held)]
    adapters = [held for held in ordered if _is_adapter(held)]
    until = mask_of("model")
    yield from _joined(loaded_in_4_bits(spec, base, _sized(base, copies, alone, Role.WEIGHTS), until))
    yield from (built._replace(mask=until) for built in _adapters(spec, adapters, copies, alone))
    sharded = [held for held in ordered if not held.beside]
    yield from _joined(chain.from_iterable(_sized(sharded, copies, options, Role.WEIGHTS)))


def _flattened(
    units: Mapping[int, tuple[LocalParameter, ...]], buffers: Sequence[RowDraft], options: StateOptions
) -> Iterator[InitialTensors]:
    """Yield the chunks of flat parameters as FSDP1 makes them, given a model in host memory and a `device_id`.

    The parameters of a unit move to the device, are concatenated, and the rank's chunk is cloned. Units are layers,
    then the root, in which the buffers are. Source: torch 2.13 distributed/fsdp/_init_utils.py,
    _init_param_handle_from_module; _flat_param.py, flatten_tensors and shard. Chunks in 16 bits are cast to fp32
    afterwards, the root's first (Accelerate 1.15 accelerator.py, prepare_model).
    """
    layers = [unit for number, unit in units.items() if number != ROOT]
    roots = [units[ROOT]] if units[ROOT] else []
    sizes = tuple(item.each for item in buffers for _ in range(item.count))
    casts = options.loaded not in ("", options.base)
    first = options._replace(base=options.loaded) if casts else options
    # With use_orig_params the parameters reference the chunks that are cast until forward replaces them.
    until = mask_of("model", "optimizer", "input", "zero_grad_1") if options.use_orig_params else mask_of("model")
    made = [_flattening(unit, first) for unit in layers]
    made += [_flattening(unit, first, () if casts else sizes) for unit in roots]
    yield InitialTensors(
        until if casts else from_phase("model"), tuple(InitialTensor(0, several=script) for script in made)
    )
    wide = DTYPE_BYTES[options.base]
    chunks = [wide * unit_of(unit, options).shard for unit in (*roots, *layers)] if casts else []
    standing = [] if roots and not casts else sizes
    yield InitialTensors(from_phase("model"), tuple(map(InitialTensor, (*chunks, *standing))))


def _flattening(
    parameters: tuple[LocalParameter, ...], options: StateOptions, buffers: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Return the requests that flatten and shard a unit: its chunk and its buffers stay."""
    unit = unit_of(parameters, options)
    size = DTYPE_BYTES[parameters[0].dtype or options.base]
    moved = [each.elements * size for each in parameters]
    whole, shard = unit.elements * size, unit.shard * size
    return (*moved, *buffers, whole, shard, -whole, *(-each for each in moved))


def _given_memory(
    spec: Spec, ordered: Sequence[LocalParameter], weights: Iterable[InitialTensors]
) -> Iterator[InitialTensors]:
    """Yield shards as nn.Module.to_empty allocates them; a tied LM head has separate memory until it is tied again."""
    yield from weights
    embedding = next((parameter for parameter in ordered if parameter.module == "embed_tokens"), None)
    if spec.model.tie_word_embeddings and embedding is not None:
        options = state_options(spec)
        elements = prod(options.spread(2).shape(embedding))
        size = DTYPE_BYTES[embedding.dtype or options.base] * elements
        yield InitialTensors(mask_of("model"), (InitialTensor(size, stays=False, component=Component.TEMPORARIES),))


def _sampled(ordered: Sequence[LocalParameter], options: StateOptions) -> Iterator[InitialTensors]:
    """Yield the masks with which torchtitan's init_weights finds values of linear layers that it has to sample again.

    Two comparisons and their union, of dtype bool; the embedding is sampled without bounds. Only the LM head's bounds,
    of three standard deviations, leave values to sample again, in further tensors that are not counted. Source: torch
    2.13 torch/nn/init.py, _no_grad_trunc_normal_; torchtitan 0.2.2 torchtitan/models/llama3/model/model.py.
    """
    until = mask_of("model")
    for held in ordered:
        if len(held.shape) == len(("out", "in")) and not is_embedding(held):
            size = prod(options.spread(2).shape(held))
            masks = InitialTensor(size, stays=False, several=(size,) * 3, component=Component.TEMPORARIES)
            yield InitialTensors(until, (masks,))


def _kept_copies(
    ordered: Sequence[LocalParameter], copies: dict[LocalParameter, list[ParameterCopy]], options: StateOptions
) -> Iterator[InitialTensors]:
    """Yield the copies other than the weights, one role after the other."""
    for role in dict.fromkeys(copy.role for found in copies.values() for copy in found):
        if role is not Role.WEIGHTS:
            yield from _joined(chain.from_iterable(_sized(ordered, copies, options, role)))


def _is_adapter(parameter: LocalParameter) -> bool:
    return parameter.module.endswith((".lora_A", ".lora_B"))


def _adapters(
    spec: Spec,
    ordered: Sequence[LocalParameter],
    copies: dict[LocalParameter, list[ParameterCopy]],
    options: StateOptions,
) -> Iterator[InitialTensors]:
    """Yield adapters as PEFT allocates them: all in the dtype of the adapted weight, then cast one at a time.

    Source: peft 0.19 tuners/tuners_utils.py, _move_adapter_to_device_of_base_layer and cast_adapter_dtype.
    """
    made = list(chain.from_iterable(_sized(ordered, copies, options, Role.WEIGHTS)))
    if not made:
        return
    adapters = adapters_of(spec)
    assert adapters is not None
    first = [InitialTensor(each.size, parameter=each.parameter) for built in made for each in built.tensors]
    # For a 4-bit matrix PEFT uses the compute dtype.
    base = DTYPE_BYTES[options.compute if adapters.quantized is not None else base_dtype(spec.training)]
    if base < DTYPE_BYTES[adapters.dtype]:
        narrow = tuple(InitialTensor(each.size * base // DTYPE_BYTES[adapters.dtype]) for each in first)
        yield InitialTensors(from_phase("model"), tuple(first), narrow)
    else:
        yield InitialTensors(from_phase("model"), tuple(first))


def _copies_of(parameters: LocalParameters, options: StateOptions) -> dict[LocalParameter, list[ParameterCopy]]:
    """Return the persistent copies of each parameter."""
    found: dict[LocalParameter, list[ParameterCopy]] = {}
    for alike, own, trains in groups(parameters, options):
        kept = [copy for copy in kept_copies(own, trains=trains) if not is_made_in_backward(copy, own)]
        found |= dict.fromkeys(alike, kept)
    return found


def _sized(
    ordered: Sequence[LocalParameter],
    copies: dict[LocalParameter, list[ParameterCopy]],
    options: StateOptions,
    role: Role,
) -> Iterator[tuple[InitialTensors, ...]]:
    """Yield the copies of each parameter with one role; some parameters have no such copy."""
    made: dict[LocalParameter, tuple[InitialTensors, ...]] = {}
    for held in dict.fromkeys(ordered):
        wanted = [copy for copy in copies[held] if copy.role is role]
        shapes = [options.spread(copy.sharded_from_stage).copy_shape(copy, held) for copy in wanted]
        parameter = held if role is Role.WEIGHTS else None
        made[held] = tuple(
            InitialTensors(
                copy.mask,
                (InitialTensor(DTYPE_BYTES[copy.dtype] * prod(shape), parameter=parameter, component=copy.component),),
            )
            for copy, shape in zip(wanted, shapes, strict=True)
        )
    return (made[held] for held in ordered)


def _joined(built: Iterable[InitialTensors]) -> Iterator[InitialTensors]:
    """Merge consecutive tensors that are live in the same phases."""
    for mask, alike in groupby(built, key=lambda each: each.mask):
        yield InitialTensors(mask, tuple(made for each in alike for made in each.tensors))


def _split_at_once(built: InitialTensors, options: StateOptions) -> Iterator[InitialTensors]:
    """Yield weights under DeepSpeed's zero.Init, which shards a module's parameters after its construction.

    Source: deepspeed 0.19 runtime/zero/partition_parameters.py, _post_init_method.
    """
    for module, made in groupby(built.tensors, key=lambda each: each.parameter and each.parameter.module):
        tensors = tuple(made)
        whole = [DTYPE_BYTES[options.base] * each.parameter.elements for each in tensors if each.parameter is not None]
        yield InitialTensors(built.mask, tensors, () if module is None else tuple(map(InitialTensor, whole)))


def _alone(item: RowDraft) -> InitialTensors:
    return InitialTensors(item.mask, (InitialTensor(item.each, component=item.component),) * item.count)


class _Buffers:
    """Buffers of transformers' modules, and their position among the parameters.

    Source: transformers 5.23, the constructors of models/<family>/modeling_<family>.py.

    Args:
        spec: the run.
        items: the buffers, and an LM head that is allocated before it is tied.
    """

    def __init__(self, spec: Spec, items: Sequence[RowDraft]) -> None:
        self.model = spec.model
        self.family = spec.model.architecture if spec.training.implementation == "huggingface" else None
        self.own = family_buffers(spec.model.architecture)
        in_layers = {ROTARY_TABLES} if self.own.sinusoids else set()
        in_layers |= {CAUSAL_MASKS} if self.own.masks == "layer" else set()
        self.of_layers = next((item for item in items if item.tensor in in_layers), None)
        self.rest = [item for item in items if item is not self.of_layers]

    def among(
        self, ordered: Sequence[LocalParameter], weights: Iterable[tuple[InitialTensors, ...]]
    ) -> Iterator[InitialTensors]:
        """Yield the weights with the buffers where modules create them."""
        before, behind = "", self.own.sinusoids
        weighted = list(zip(ordered, weights, strict=True))
        ends = max((at for at, (held, _) in enumerate(weighted) if not is_output(held)), default=-1)
        for at, (parameter, made) in enumerate(weighted):
            here = parameter.module.rpartition("*.")[2].partition(".")[0]
            if self.of_layers is not None and (before if behind else here) == "attention" and here != before:
                yield InitialTensors(self.of_layers.mask, (self._of_a_layer(),))
            before = here
            yield from made
            if self.family == "mpt" and "norm" in parameter.module:  # its bias is set to None
                yield from (InitialTensors(mask_of("model"), (each.tensors[0]._replace(stays=False),)) for each in made)
            if at == ends:
                yield from self._after_the_layers()

    def _after_the_layers(self) -> Iterator[InitialTensors]:
        head: list[InitialTensors] = []  # LM head before it is tied
        again: list[InitialTensor] = []  # buffers that _init_weights copies
        for item in self.rest:
            made = _mask(item.each) if item.tensor == CAUSAL_MASKS else InitialTensor(item.each)
            made = made._replace(component=item.component)
            again += [made._replace(stays=False)] * item.count if made.before else []
            built = InitialTensors(item.mask, (made,) * item.count)
            if item.component is Component.TEMPORARIES:
                head.append(InitialTensors(item.mask, (made._replace(stays=False),) * item.count))
            else:
                yield built
        if self.of_layers is not None:
            again += [self._of_a_layer()._replace(stays=False)] * self.model.num_layers
        if again:
            yield InitialTensors(mask_of("model"), tuple(again))
        yield from head

    def _of_a_layer(self) -> InitialTensor:
        positions, rotated = self.model.max_position_embeddings, self.model.rotary_dim
        return _sinusoids(positions, rotated) if self.own.sinusoids else _mask(positions**2)


def _mask(elements: int) -> InitialTensor:
    """Return a causal mask: torch.tril(torch.ones(...)), of dtype bool."""
    return InitialTensor(elements, (elements,))


def _sinusoids(positions: int, width: int) -> InitialTensor:
    """Return a tensor of sines and cosines, with its temporaries (create_sinusoidal_positions of codegen and gptj)."""
    angles = 4 * positions * (width // 2)
    counted = (8 * positions, 4 * positions, -8 * positions, angles, -4 * positions)
    return InitialTensor(4 * positions * width, (*counted, angles, angles))
