"""Model states under FSDP1: weights and gradients are chunks of flat parameters, the optimizer's are views of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.flat_parameters import (
    ROOT_MODULE,
    FlatUnit,
    flat_row,
    flat_unit,
    is_apart,
    part_of,
    piece,
    units_of,
)
from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, mask_of
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.optimizers.parameter_order import registered
from memcalc.states.state_options import FsdpOptions, StateOptions


class FlatStates(NamedTuple):
    """The states of parameters of one dtype."""

    stored: LocalParameters  # the flat parameters, of which a rank has chunks
    updated: LocalParameters  # the tensors that the optimizer updates
    options: StateOptions  # the options for `updated`: those of one rank where they are a rank's parts


def unit_of(parameters: tuple[LocalParameter, ...], options: StateOptions) -> FlatUnit:
    """Return the flat parameter of a unit."""
    compute = options.fsdp.gathered or parameters[0].dtype or options.base
    return flat_unit(parameters, options.data_parallel, DTYPE_BYTES[compute], aligned=options.fsdp.use_orig_params)


def flattens(options: StateOptions) -> bool:
    """Return whether parameters are flattened: under FSDP1 on several ranks."""
    return options.engine == "fsdp1" and options.data_parallel > 1


def flat_states(parameters: LocalParameters, options: StateOptions, rank: int = 0) -> FlatStates:
    """Return the states of parameters of one dtype on a rank; without FSDP1 those of the parameters themselves."""
    if not flattens(options):
        return FlatStates(parameters, parameters, options)
    return _flat_states(parameters, options, rank)


@lru_cache(maxsize=256)
def _flat_states(parameters: LocalParameters, options: StateOptions, rank: int) -> FlatStates:
    beside = [each for each in parameters if each.beside]
    parts = registered(LocalParameters(each for each in parameters if not each.beside), options.update.family)
    stored, whole, pieces = [], [], []
    for name, members in _units(parts, options):
        unit, where = unit_of(members, options), members[0].where
        is_root = name == ROOT_MODULE
        stored.append(flat_row(name, members, unit, "head" if is_root else where))
        whole.append(flat_row(name, members, unit, "embedding" if is_root else where))
        pieces += [piece(each, size) for each, size in zip(members, unit.pieces(rank), strict=True) if size]
    updated, own = (pieces, _alone(options)) if options.fsdp.use_orig_params else (whole, options)
    return FlatStates(LocalParameters([*stored, *beside]), LocalParameters(updated), own)


def stored_dtype(members: Sequence[LocalParameter], options: StateOptions) -> str:
    """Return the dtype of a unit's chunks."""
    return members[0].dtype or options.base


def flattened_dtype(members: Sequence[LocalParameter], options: StateOptions) -> str:
    """Return the dtype in which a unit is flattened: Accelerate casts only chunks that train to fp32 afterwards."""
    own = stored_dtype(members, options)
    return options.fsdp.loaded or own if any(each.trains for each in members) else own


def construction_rows(
    parameters: LocalParameters, options: StateOptions, *, is_loaded_whole: bool
) -> Iterator[RowDraft]:
    """Yield what FSDP1 allocates while the model is built, in addition to the chunks.

    A unit is moved to the GPU and flattened, and the rank's chunk is cloned, the root last. A model that is loaded on
    the GPU is all there until the first layer is flattened; its adapters are in fp32 first. Source: torch 2.13
    distributed/fsdp/_init_utils.py, _init_param_handle_from_module.

    Args:
        parameters: the parameters of the model.
        options: state options of the run.
        is_loaded_whole: whether the model is loaded on the GPU.
    """
    units = dict(_units(registered(parameters, options.update.family), options))
    whole, flat, shard = dict[str, int](), dict[str, int](), dict[str, int]()
    loaded = cast = 0  # what is on the GPU in addition to the chunks before a unit is flattened; what chunks grow by
    for name, members in units.items():
        size, own = (DTYPE_BYTES[each] for each in (flattened_dtype(members, options), stored_dtype(members, options)))
        unit, elements, count = (
            unit_of(members, options),
            sum(each.elements for each in members),
            _copies(name, members),
        )
        whole[name], flat[name], shard[name] = size * elements, size * unit.elements, size * unit.shard
        loaded += own * (elements - unit.shard) * count
        cast += (own - size) * unit.shard * count
    peaks = [(whole.get(ROOT_MODULE, 0) + flat.get(ROOT_MODULE, 0) - cast, "2·P_root")]
    if is_loaded_whole:
        rest = sum((whole[name] - shard[name]) * _copies(name, units[name]) for name in units)
        layer = max((flat[name] + shard[name] for name in units if name.endswith("*")), default=0)
        peaks += [(rest + layer - cast, "P - P/N + P_layer"), (loaded, "P - P/N")]
    size, symbol = max(peaks)
    if size > 0:
        citation = "torch 2.13 distributed/fsdp/_flat_param.py: flatten_tensors"
        tensor = (Component.TEMPORARIES, "root", "parameters, moved and flattened", (size,), "uint8")
        yield RowDraft(*tensor, 1, size, rounded(size), mask_of("model"), symbol, citation)


def _units(
    parts: tuple[Sequence[LocalParameter], Sequence[LocalParameter], Sequence[LocalParameter]], options: StateOptions
) -> Iterator[tuple[str, tuple[LocalParameter, ...]]]:
    """Yield the name and the parameters of each distinct unit, of those before, in and after the layers."""
    return units_of(*parts, partial(_unit_name, options=options), options.fsdp.layers)


def _unit_name(parameter: LocalParameter, options: StateOptions) -> str:
    """Return the name of a parameter's unit."""
    if has_own_unit(parameter, options.fsdp):
        return parameter.module
    in_root = parameter.where != "layer" or is_joined(parameter, options.fsdp)
    return ROOT_MODULE if in_root else f"{parameter.module.partition('*')[0]}*"


def has_own_unit(parameter: LocalParameter, fsdp: FsdpOptions) -> bool:
    """Return whether a parameter's module is a unit: it is large enough or, with PEFT's policy, it trains."""
    return is_apart(parameter, fsdp.least_apart) or (fsdp.trained_apart and parameter.trains)


def is_joined(parameter: LocalParameter, fsdp: FsdpOptions) -> bool:
    """Return whether a parameter of a layer is in the root's unit."""
    return parameter.where == "layer" and part_of(parameter) in fsdp.joined_parts


def _copies(name: str, members: Sequence[LocalParameter]) -> int:
    """Return the number of units like this one."""
    return 1 if name == ROOT_MODULE else members[0].count


def _alone(options: StateOptions) -> StateOptions:
    """Return the options for tensors that are a rank's parts already."""
    return options._replace(data_parallel=1, expert_shards=1)
