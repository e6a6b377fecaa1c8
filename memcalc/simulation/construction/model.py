"""Allocations before the first step, in order: the model, its copies, the batch."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from math import prod

from memcalc.layout.adapters import adapters_of
from memcalc.layout.flat_parameters import module_in
from memcalc.layout.local_parameters import LocalParameter, LocalParameters, stage_parameters
from memcalc.layout.parameters import layer_prefixes
from memcalc.layout.stages import Stage
from memcalc.layout.teacher import teacher_run, teacher_stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, from_phase, mask_of
from memcalc.sharding.engine import ROOT, by_unit, is_embedding, is_output
from memcalc.sharding.flat_units import THE_ROOT, UnitKey, in_order_of_end, unit_of_parameter, units_in_order
from memcalc.simulation.construction.fsdp2_loading import broadcast_from_first_rank, moved_from_host
from memcalc.simulation.construction.initial_tensors import InitialTensor, InitialTensors
from memcalc.simulation.construction.megatron import built_by_megatron
from memcalc.simulation.construction.module_buffers import ModuleBuffers
from memcalc.simulation.construction.nf4_tensors import built_with_nf4_tensors, makes_nf4_tensors
from memcalc.simulation.construction.quantization import FP32, WIDE, in_4_bits, loaded_in_4_bits
from memcalc.spec.finetuning import QloraSpec, base_dtype
from memcalc.spec.fp32_modules import in_fp32
from memcalc.spec.programs import OF_TRANSFORMERS, TRL, is_before
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states.flat_states import flattened_dtype, flattens, stored_dtype, unit_of
from memcalc.states.optimizers.parameter_order import in_order
from memcalc.states.parameter_copies import ParameterCopy, Role
from memcalc.states.persistent import persistent_rows, registered_buffers
from memcalc.states.recipe_copies import is_made_in_backward, kept_copies
from memcalc.states.state_options import StateOptions, groups, state_options
from memcalc.states.unsharded_weights import is_built_on_meta, loads_whole_weights, shards_loaded_model
from memcalc.states.upcast_weights import is_upcast

LOADED = "loaded"  # the group of weights in the dtype they are loaded in
SORTS = "5.0"  # of transformers: the first release that loads weights in the order of their names
WARMS_UP = "4.50"  # of transformers: the first release with caching_allocator_warmup
BROADCAST_BYTES = 250 * 2**20  # torch distributed/fsdp/_init_utils.py, PARAM_BROADCAST_BUCKET_SIZE
MAPS = "0.26"  # of TRL: the first release that loads with device_map="auto"
SAMPLES_AGAIN = (2, 13)  # the torch version in which trunc_normal_ samples values beyond the bounds again


def built_before_training(spec: Spec, stage: Stage, options: StateOptions) -> Iterator[InitialTensors]:
    """Yield weights and buffers in the order of module construction, then the recipe's copies, and the batch.

    Workspaces are allocated by the operators that need them, gradients in backward, logits in forward. The weights and
    buffers of a teacher follow those of the model.
    """
    yield from _built_of_model(spec, stage, options)
    if spec.training.teacher is not None:
        run = teacher_run(spec)
        for built in _built_of_model(run, teacher_stage(spec), state_options(run)):
            weights = tuple(made for made in built.tensors if made.component is Component.WEIGHTS)
            if weights == built.tensors:
                yield _frozen(built)


def _built_of_model(spec: Spec, stage: Stage, options: StateOptions) -> Iterator[InitialTensors]:
    parameters = stage_parameters(spec, stage)
    ordered = tuple(in_order(parameters, options.update.family, layer_prefixes(spec.model, stage.numbers)))
    copies = _copies_of(parameters, options)
    yield from _warmup(spec, ordered, options)
    # Workspaces and logits are allocated by the passes.
    later = (Component.LIBRARY_WORKSPACE, Component.LOGITS_AND_LOSS)
    standing = [item for item in persistent_rows(spec, stage, None) if item.component not in later]
    buffers = ModuleBuffers(spec, [item for item in standing if item.component is not Component.INPUTS])
    if options.engine == "megatron":  # its engine allocates the copies, its modules their buffers
        yield from built_by_megatron(ordered, options)
        yield from (_alone(item) for item in standing if item.component is Component.INPUTS)
        return
    if options.engine == "fsdp2" and options.host.has_weights:
        yield from (_alone(item) for item in standing)
        return
    if flattens(options):
        by_place = by_unit(ordered, stage.numbers)
        units, is_loaded = units_in_order(by_place, options), spec.training.finetune == "qlora"
        if is_loaded:
            yield from _loaded(spec, by_place, copies, options)
        built = [item for item in standing if item.component is Component.WEIGHTS]
        broadcasts = spec.training.framework is not None  # Trainer's default, and usual in Accelerate's files
        yield from _flattened(units, built, options, is_loaded=is_loaded, broadcasts=broadcasts)
        yield from _kept_copies(ordered, copies, options)
        yield from (_alone(item) for item in standing if item.component is Component.INPUTS)
        return
    if is_built_on_meta(spec) or shards_loaded_model(spec):
        with_buffers = spec.training.implementation in ("huggingface", "torchtitan") and is_built_on_meta(spec)
        with_buffers = with_buffers and not loads_whole_weights(spec)
        yield from _distributed(spec, stage, ordered, copies, options, buffers if with_buffers else None)
        yield from _kept_copies(ordered, copies, options)
        yield from (_alone(item) for item in standing if not with_buffers or item.component is Component.INPUTS)
        return
    base = tuple(held for held in _as_loaded(spec, ordered, stage.numbers) if not held.adapts)
    if makes_nf4_tensors(spec):
        weights = built_with_nf4_tensors(spec, base, lambda held: _sized(held, copies, options, Role.WEIGHTS), standing)
    else:
        sized = _sized(base, copies, options, Role.WEIGHTS)
        weights = _joined(buffers.among(base, sized if spec.training.qlora is None else in_4_bits(spec, base, sized)))
    upcasts = spec.training.lora is not None and bool(spec.training.lora.fp32_on_load)
    if upcasts:
        weights = _upcast_and_back(spec, weights)
    elif spec.training.fp32_modules:
        weights = _upcast(spec, weights)
    if _casts_weights(spec):
        weights = (_cast_from_fp32(built, options) for built in weights)
    copies_itself = options.engine == "deepspeed"
    yield from _of_deepspeed(weights, options) if copies_itself else weights
    yield from _sampled(spec, ordered, options)
    yield from _adapters(spec, [held for held in ordered if held.adapts], copies, options)
    if upcasts:  # axolotl 0.19 loaders/model.py, _apply_post_lora_load_setup
        yield InitialTensors(mask_of("model"), (), empties_cache=True)
    if not copies_itself:
        yield from _kept_copies(ordered, copies, options)
    yield from (_alone(item) for item in standing if item.component is Component.INPUTS)


def _of_deepspeed(weights: Iterable[InitialTensors], options: StateOptions) -> Iterator[InitialTensors]:
    """Yield the weights and buffers of a model, and those of a reference model, which is constructed like it.

    TRL 1.16 trainer/dpo_trainer.py, __init__: at stage 3 zero.Init shards it after the policy. Otherwise it moves to
    the GPU before the policy, which Trainer moves when training begins (models/utils.py, prepare_deepspeed).
    """
    splits = options.partitions_gradients and options.zero_stage == 3
    policy = [part for built in weights for part in _split_at_once(built, options)] if splits else [*weights]
    reference = [*map(_frozen, policy)] if options.model.has_reference_model else []
    yield from (*policy, *reference) if splits else (*reference, *policy)


def _frozen(built: InitialTensors) -> InitialTensors:
    """Return tensors of a reference model: they are no parameters of the optimizer."""
    return built._replace(tensors=tuple(made._replace(parameter=None) for made in built.tensors))


def _as_loaded(spec: Spec, ordered: tuple[LocalParameter, ...], layers: Sequence[int]) -> Iterable[LocalParameter]:
    """Return parameters in the order in which they get memory.

    transformers 5 loads a 4-bit base in the order of names (5.23 core_model_loading.py, dot_natural_key). Other models
    move to the GPU in the order of their modules.
    """
    training = spec.training
    loads = training.finetune == "qlora" and training.framework in OF_TRANSFORMERS
    if not loads or is_before(training.versions, "transformers", SORTS):
        return ordered
    return (parameter for _, parameter in _in_checkpoint(by_unit(ordered, layers)))


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


def _upcast_and_back(spec: Spec, weights: Iterable[InitialTensors]) -> Iterator[InitialTensors]:
    """Yield weights that are cast to fp32, one module after the other, and then back in the same way.

    PEFT 0.21 utils/other.py, prepare_model_for_kbit_training, empties the cache between.
    """
    cast: list[tuple[int, InitialTensor]] = []
    ratio = DTYPE_BYTES["fp32"] // DTYPE_BYTES[base_dtype(spec.training)]
    until = mask_of("model")
    yield from _before_casts(weights, partial(is_upcast, spec), 1, cast)
    for number, (_, made) in enumerate(cast):
        wide = (InitialTensor(ratio * made.size),)
        yield InitialTensors(until, wide, groups=((WIDE, number),), frees=(LOADED, number))
    yield InitialTensors(until, (), empties_cache=True)
    for number, (mask, made) in enumerate(cast):
        yield InitialTensors(mask, (made,), frees=(WIDE, number))


def _upcast(spec: Spec, weights: Iterable[InitialTensors]) -> Iterator[InitialTensors]:
    """Yield weights of which those of `fp32_modules` are cast when all exist.

    axolotl casts in the order of modules, memcalc/step/huggingface.py the ends of the model first.
    """
    modules, cast = spec.training.fp32_modules, list[tuple[int, InitialTensor]]()
    ratio = DTYPE_BYTES["fp32"] // DTYPE_BYTES[base_dtype(spec.training)]
    yield from _before_casts(weights, lambda held: in_fp32(held.module, modules), ratio, cast)
    ends = () if spec.training.framework == "axolotl" else tuple(name for name in modules if name != "norm")

    def place(number: int) -> int:
        parameter = cast[number][1].parameter
        return next((at for at, name in enumerate(ends) if parameter and parameter.module == name), len(ends))

    for number in sorted(range(len(cast)), key=place):
        mask, made = cast[number]
        yield InitialTensors(mask, (made,), frees=(LOADED, number))


def _before_casts(
    weights: Iterable[InitialTensors],
    is_cast: Callable[[LocalParameter], bool],
    ratio: int,
    cast: list[tuple[int, InitialTensor]],
) -> Iterator[InitialTensors]:
    """Yield weights, those that will be cast `ratio` times as small; append their masks and themselves to `cast`."""
    for built in weights:
        for made in built.tensors:
            if made.parameter is not None and is_cast(made.parameter):
                narrow = made._replace(size=made.size // ratio, parameter=None)
                yield InitialTensors(mask_of("model"), (narrow,), groups=((LOADED, len(cast)),))
                cast.append((built.mask, made))
            else:
                yield built._replace(tensors=(made,))


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
    yield _all_weights(ordered, options)


def _all_weights(ordered: Sequence[LocalParameter], options: StateOptions) -> InitialTensors:
    """Return one allocation of the size of all weights, freed at once."""
    size = 0
    for _, found in groupby(ordered, key=lambda held: held.module):
        first, *rest = found  # what quantization adds to a 4-bit matrix follows it
        loaded = [] if first.adapts else [first, *(held for held in rest if not held.beside)]
        size += sum(DTYPE_BYTES[held.dtype or options.base] * held.elements for held in loaded)
    return InitialTensors(mask_of("model"), (InitialTensor(size, stays=False, component=Component.TEMPORARIES),))


def loaded_model(spec: Spec, stage: Stage, options: StateOptions) -> Iterator[InitialTensors]:
    """Yield the weights of a loaded model in registration order, then its buffers.

    from_pretrained builds modules on the meta device, and allocates each weight when it is loaded. Tied weights are
    allocated once. 4-bit weights need a device map, as in a step (`_warmup`), and are loaded in the order of names.
    """
    assert spec.inference is not None
    parameters, quantization = stage_parameters(spec, stage), spec.inference.quantization
    ordered = tuple(in_order(parameters, options.update.family, layer_prefixes(spec.model, stage.numbers)))
    copies = _copies_of(parameters, options)
    if quantization == "none":
        weights = _sized(ordered, copies, options, Role.WEIGHTS)
    else:
        qlora = QloraSpec(quantization=quantization, double_quantization=False)  # BitsAndBytesConfig's defaults
        run = spec.with_training(qlora=qlora)
        ordered = tuple(parameter for _, parameter in _in_checkpoint(by_unit(ordered, stage.numbers)))
        yield _all_weights(ordered, options)
        weights = in_4_bits(run, ordered, _sized(ordered, copies, options, Role.WEIGHTS))
    yield from _joined(chain.from_iterable(weights))
    buffers = registered_buffers(spec, stage)
    yield from (_alone(item) for item in buffers if item.component is Component.WEIGHTS)


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
    base = [held for held in ordered if not held.adapts]
    adapters = [held for held in ordered if held.adapts]
    until = mask_of("model")
    modules = loaded_in_4_bits(spec, base, _sized(base, copies, alone, Role.WEIGHTS), until)
    yield from chain.from_iterable(modules)
    yield from (built._replace(mask=until) for built in _adapters(spec, adapters, copies, alone))
    sharded = [held for held in ordered if not held.beside]
    yield from _joined(chain.from_iterable(_sized(sharded, copies, options, Role.WEIGHTS)))


def _loaded(
    spec: Spec,
    by_place: Mapping[int, Sequence[LocalParameter]],
    copies: dict[LocalParameter, list[ParameterCopy]],
    options: StateOptions,
) -> Iterator[InitialTensors]:
    """Yield a 4-bit base and its adapters as they are loaded on the GPU, in the groups that FSDP1 flattens.

    Weights are loaded in the order of their names (transformers 5.23 core_model_loading.py), adapters in that of their
    modules. TRL casts adapters in fp32 to bf16, one at a time (1.16 trainer/sft_trainer.py).
    """
    alone, until = options._replace(data_parallel=1, expert_shards=1), mask_of("model")
    found = [(unit_of_parameter(place, each, options), each) for place, each in _in_checkpoint(by_place)]
    base = [(unit, each) for unit, each in found if not each.adapts]
    ordered = [each for _, each in base]
    modules = loaded_in_4_bits(spec, ordered, _sized(ordered, copies, alone, Role.WEIGHTS), until)
    units = [unit for (unit, _), _ in groupby(base, key=lambda each: (each[0], each[1].module))]
    for unit, module in zip(units, modules, strict=True):
        for built in module:
            is_flattened = built.mask == until and not built.groups
            yield built._replace(groups=(unit,) * len(built.tensors)) if is_flattened else built
    adapters = [(unit, each) for unit, each in found if each.adapts]
    units = [unit for unit, _ in adapters]
    for made in _adapters(spec, [each for _, each in adapters], copies, alone):
        if not options.fsdp.loaded:
            yield made._replace(mask=until, groups=tuple(units))
            continue
        yield made._replace(mask=until, groups=tuple((WIDE, unit) for unit in units))
        for unit, wide in zip(units, made.tensors, strict=True):
            narrow = wide._replace(size=wide.size * DTYPE_BYTES[options.fsdp.loaded] // FP32)
            yield InitialTensors(until, (narrow,), groups=(unit,), frees=(WIDE, unit))


def _in_checkpoint(by_place: Mapping[int, Sequence[LocalParameter]]) -> Iterator[tuple[int, LocalParameter]]:
    """Yield the parameters of all units in the order of their names in a checkpoint, each with its unit."""
    root = by_place[ROOT]
    at_end = [each for each in root if each.where != "embedding" and not is_output(each)]
    before = sorted((each for each in root if each not in at_end), key=is_output, reverse=True)  # lm_head, model.
    yield from ((ROOT, each) for each in before)
    for place in sorted(place for place in by_place if place != ROOT):
        yield from ((place, each) for each in sorted(by_place[place], key=_name_in_checkpoint))
    yield from ((ROOT, each) for each in at_end)


def _name_in_checkpoint(parameter: LocalParameter) -> str:
    """Return a name by which a layer's modules are in the order of their names in LLaMA and its copies."""
    return parameter.module.replace("attention.", "self_attn.") if not parameter.adapts else ""


def _flattened(
    units: Mapping[UnitKey, tuple[LocalParameter, ...]],
    buffers: Sequence[RowDraft],
    options: StateOptions,
    *,
    is_loaded: bool,
    broadcasts: bool,
) -> Iterator[InitialTensors]:
    """Yield the chunks of flat parameters as FSDP1 makes them with a `device_id`.

    The parameters of a unit move to the device, those of outer modules first, and are concatenated; the rank's chunk is
    cloned. The root is last, with its buffers. Source: torch 2.13 distributed/fsdp/_init_utils.py,
    _init_param_handle_from_module and _move_module_to_device; _flat_param.py, flatten_tensors and shard. Chunks that
    train are cast from 16 bits to fp32 afterwards, the root's first (Accelerate 1.15 accelerator.py, prepare_model).

    Args:
        units: the parameters of each unit.
        buffers: the buffers of the model.
        options: state options of the run.
        is_loaded: whether the model is on the device, in a group of tensors for each unit, instead of in host memory.
        broadcasts: whether the first rank sends its parameters to the others (`sync_module_states`).
    """
    sizes = tuple(item.each for item in buffers for _ in range(item.count))
    made_in = {unit: flattened_dtype(members, options) for unit, members in units.items()}
    casts = [unit for unit, members in units.items() if made_in[unit] != stored_dtype(members, options)]
    # With use_orig_params the parameters reference the chunks that are cast until forward replaces them.
    until = mask_of("model", "optimizer", "input", "zero_grad_1") if options.fsdp.use_orig_params else mask_of("model")
    adapted = {UnitKey(unit.place, unit.module.rpartition(".")[0]) for unit in units if ".lora_" in unit.module}
    for unit in in_order_of_end([*units]):
        if unit in units:
            own = [DTYPE_BYTES[made_in[unit]] * each.elements for each in units[unit]]
            order = sorted(range(len(own)), key=lambda at: _depth(units[unit][at], unit.place, adapted))
            moved = [] if is_loaded else [own[at] for at in order]
            made = sizes if unit == THE_ROOT and unit not in casts else ()
            sent = _broadcast(own, sizes if unit == THE_ROOT else (), made_in[unit]) if broadcasts else ()
            script = (*moved, *made, *sent, *_flattening(units[unit], options), *(-each for each in moved))
            mask = until if unit in casts else from_phase("model")
            yield InitialTensors(mask, (InitialTensor(0, several=script),), frees=unit)
    chunks = [DTYPE_BYTES[stored_dtype(units[unit], options)] * unit_of(units[unit], options).shard for unit in casts]
    standing = [] if THE_ROOT in units and THE_ROOT not in casts else sizes
    yield InitialTensors(from_phase("model"), tuple(map(InitialTensor, (*chunks, *standing))))


def _depth(parameter: LocalParameter, place: int, adapted: Container[UnitKey]) -> int:
    """Return the depth of a parameter's module in its layer: PEFT puts an adapted one inside another module."""
    module = module_in(parameter)
    return module.count(".") + (UnitKey(place, module) in adapted)


def _broadcast(own: Sequence[int], buffers: Sequence[int], dtype: str) -> Iterator[int]:
    """Yield the requests that broadcast a unit's parameters and buffers from the first rank, in buckets of one dtype.

    A bucket of one tensor is not copied. Source: torch 2.13 distributed/fsdp/_init_utils.py,
    _sync_module_params_and_buffers; csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size.
    """
    for sizes in ([*buffers, *own],) if dtype == "fp32" else (buffers, own):
        bucket: list[int] = []
        for position, size in enumerate(sizes, 1):
            bucket.append(size)
            if sum(bucket) >= BROADCAST_BYTES or position == len(sizes):
                if len(bucket) > 1:
                    yield sum(bucket)
                    yield -sum(bucket)
                bucket = []


def _flattening(members: tuple[LocalParameter, ...], options: StateOptions) -> tuple[int, ...]:
    """Return the requests that flatten and shard a unit: its chunk stays."""
    unit, size = unit_of(members, options), DTYPE_BYTES[flattened_dtype(members, options)]
    return unit.elements * size, unit.shard * size, -unit.elements * size


def _distributed(
    spec: Spec,
    stage: Stage,
    ordered: Sequence[LocalParameter],
    copies: dict[LocalParameter, list[ParameterCopy]],
    options: StateOptions,
    buffers: ModuleBuffers | None,
) -> Iterator[InitialTensors]:
    """Yield the weights of FSDP2 or DTensor, with what is on the GPU before they are sharded.

    `buffers`: those that get memory together with the weights.
    """
    if shards_loaded_model(spec):
        yield from _sharded_afterwards(spec, ordered, copies, options)
        return
    sized = _sized(ordered, copies, options, Role.WEIGHTS)
    if loads_whole_weights(spec):
        shards = dict(zip(ordered, sized, strict=True))
        if spec.parallelism.fsdp.weights_from == "host":
            yield from moved_from_host(by_unit(ordered, stage.numbers, options.fsdp), shards, options)
        else:
            yield from broadcast_from_first_rank(ordered, shards, options, tied=spec.model.tie_word_embeddings)
        return
    weights = chain.from_iterable(sized) if buffers is None else buffers.among(ordered, sized)
    yield from _given_memory(spec, ordered, _joined(weights))
    yield from _sampled(spec, ordered, options)


def _given_memory(
    spec: Spec, ordered: Sequence[LocalParameter], weights: Iterable[InitialTensors]
) -> Iterator[InitialTensors]:
    """Yield shards as nn.Module.to_empty allocates them; a tied LM head has separate memory until it is tied again.

    A pipeline has no tied weights, but copies on its first and its last stage.
    """
    embedding = next((parameter for parameter in ordered if parameter.module == "embed_tokens"), None)
    tied = spec.model.tie_word_embeddings and spec.parallelism.pipeline_parallel == 1
    if not tied or embedding is None:
        yield from weights
        return
    options = state_options(spec)
    elements = prod(options.spread(2).shape(embedding))
    size = DTYPE_BYTES[embedding.dtype or options.base] * elements
    other = InitialTensor(size, component=Component.TEMPORARIES)
    if options.engine != "fsdp2":
        yield from weights
        yield InitialTensors(mask_of("model"), (other._replace(stays=False),))
        return
    for built in weights:  # FSDP2 keeps the LM head's memory (torch 2.13 _fully_shard.py, _apply; reset_sharded_param)
        for made in built.tensors:
            if made.parameter == embedding:
                yield InitialTensors(mask_of("model"), (other,), groups=(embedding,))
                head = built._replace(tensors=(made,), frees=embedding)
            else:
                yield built._replace(tensors=(made,))
    yield head


def _sampled(spec: Spec, ordered: Sequence[LocalParameter], options: StateOptions) -> Iterator[InitialTensors]:
    """Yield the masks with which torchtitan's init_weights finds values of linear layers that it has to sample again.

    Two comparisons and their union, of dtype bool; the embedding is sampled without bounds. Only the LM head's bounds,
    of three standard deviations, leave values to sample again, in further tensors that are not counted. Source: torch
    2.13 torch/nn/init.py, _no_grad_trunc_normal_; torchtitan 0.2.2 torchtitan/models/llama3/model/model.py.
    """
    if spec.training.implementation != "torchtitan" or spec.training.torch < SAMPLES_AGAIN:
        return
    until = mask_of("model")
    for held in ordered:
        if len(held.shape) == len(("out", "in")) and not is_embedding(held):
            size = prod(options.spread(2).shape(held))
            masks = InitialTensor(size, stays=False, several=(size,) * 3, component=Component.TEMPORARIES)
            yield InitialTensors(until, (masks,))


def _kept_copies(
    ordered: Sequence[LocalParameter], copies: dict[LocalParameter, list[ParameterCopy]], options: StateOptions
) -> Iterator[InitialTensors]:
    """Yield the copies other than the weights, one role after the other, and last an average."""
    roles = dict.fromkeys(copy.role for found in copies.values() for copy in found)
    for role in sorted(roles, key=lambda role: role is Role.AVERAGE):
        if role is not Role.WEIGHTS:
            yield from _joined(chain.from_iterable(_sized(ordered, copies, options, role)))


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
    """Merge consecutive tensors that are live in the same phases, and freed only after these."""
    for (mask, grouped), alike in groupby(built, key=lambda each: (each.mask, bool(each.groups or each.frees))):
        if grouped:
            yield from alike
        else:
            yield InitialTensors(mask, tuple(made for each in alike for made in each.tensors))


def _split_at_once(built: InitialTensors, options: StateOptions) -> Iterator[InitialTensors]:
    """Yield weights under DeepSpeed's zero.Init, which shards a module's parameters after its construction.

    Weights in host memory are constructed on the device as well, and sharded into host memory. The shard of an LM head
    that is tied later is freed when the garbage collector runs, by the beginning of training (Trainer calls it).
    Source: deepspeed 0.19 runtime/zero/partition_parameters.py, _post_init_method.
    """
    kept, width = 0 if options.host.has_weights else 1, DTYPE_BYTES[options.base]
    for module, made in groupby(built.tensors, key=lambda each: each.parameter and each.parameter.module):
        tensors = tuple(made)
        if module is not None:
            whole = [width * each.parameter.elements for each in tensors if each.parameter is not None]
            tensors = tuple(each._replace(size=kept * each.size) for each in tensors)
            yield InitialTensors(built.mask, tensors, tuple(_constructed(size, options) for size in whole))
        elif tensors[0].component is Component.TEMPORARIES:
            shards = (
                InitialTensor(kept * width * -(-each.size // (width * options.data_parallel))) for each in tensors
            )
            wholes = (_constructed(each.size, options) for each in tensors)
            yield InitialTensors(mask_of("model"), tuple(shards), tuple(wholes))
        else:
            yield InitialTensors(built.mask, tensors)


def _constructed(size: int, options: StateOptions) -> InitialTensor:
    """Return a weight before it is sharded, which zero.Init may have cast (zero_wrapper_for_fp_tensor_constructor)."""
    wide = size * DTYPE_BYTES["fp32"] // DTYPE_BYTES[options.base]
    return InitialTensor(size, (wide,) if options.zero.casts_fp32_weights and wide > size else ())


def _alone(item: RowDraft) -> InitialTensors:
    return InitialTensors(item.mask, (InitialTensor(item.each, component=item.component),) * item.count)
