"""Model states under FSDP1: weights and gradients are chunks of flat parameters, the optimizer's are views of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.flat_parameters import ROOT_MODULE, FlatUnit, flat_row, flat_unit, piece, units_of
from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, mask_of
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.optimizers.parameter_order import registered
from memcalc.states.state_options import StateOptions


class FlatStates(NamedTuple):
    """The states of parameters of one dtype.

    Args:
        stored: the flat parameters, of which a rank has chunks.
        updated: the tensors that the optimizer updates.
        options: the options for `updated`: those of one rank where they are a rank's parts.
    """

    stored: LocalParameters
    updated: LocalParameters
    options: StateOptions


def unit_of(parameters: tuple[LocalParameter, ...], options: StateOptions) -> FlatUnit:
    """Return the flat parameter of a unit."""
    compute = options.gathered or parameters[0].dtype or options.base
    return flat_unit(parameters, options.data_parallel, DTYPE_BYTES[compute], aligned=options.use_orig_params)


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
    for name, members in units_of(*parts):
        unit = unit_of(members, options)
        is_root = name == ROOT_MODULE
        stored.append(flat_row(name, members, unit, "head" if is_root else "layer"))
        whole.append(flat_row(name, members, unit, "embedding" if is_root else "layer"))
        pieces += [piece(each, size) for each, size in zip(members, unit.pieces(rank), strict=True) if size]
    updated, own = (pieces, _alone(options)) if options.use_orig_params else (whole, options)
    return FlatStates(LocalParameters([*stored, *beside]), LocalParameters(updated), own)


def construction_rows(parameters: LocalParameters, options: StateOptions) -> Iterator[RowDraft]:
    """Yield what FSDP1 allocates while the model is built, in addition to the chunks: the root, moved and flattened.

    torch 2.13 distributed/fsdp/_init_utils.py, _init_param_handle_from_module: layers are sharded before the root.
    """
    units = dict(units_of(*registered(parameters, options.update.family)))
    root = units.get(ROOT_MODULE, ())
    if not root:
        return
    loaded, own = (DTYPE_BYTES[each] for each in (options.loaded or options.base, options.base))
    whole = sum(each.elements for each in root) + unit_of(root, options).elements
    shards = sum(
        unit_of(members, options).shard * (1 if name == ROOT_MODULE else members[0].count)
        for name, members in units.items()
    )
    size = max(loaded * whole - (own - loaded) * shards, 0)
    if size:
        citation = "torch 2.13 distributed/fsdp/_flat_param.py: flatten_tensors"
        tensor = (Component.TEMPORARIES, "root", "parameters, moved and flattened", (size,), "uint8")
        yield RowDraft(*tensor, 1, size, rounded(size), mask_of("model"), f"{loaded}·2·P_root", citation)


def _alone(options: StateOptions) -> StateOptions:
    """Return the options for tensors that are a rank's parts already."""
    return options._replace(data_parallel=1, expert_shards=1)
