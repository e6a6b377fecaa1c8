"""Allocations that load weights under FSDP2: each unit, or each weight, is on the GPU whole before its shards are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import mask_of
from memcalc.sharding.engine import EMBEDDING, ROOT, TAIL, is_embedding
from memcalc.simulation.construction.initial_tensors import InitialTensor, InitialTensors
from memcalc.states.state_options import StateOptions
from memcalc.states.unsharded_weights import whole_bytes

Shards = Mapping[LocalParameter, tuple[InitialTensors, ...]]


def moved_from_host(
    units: Mapping[int, Sequence[LocalParameter]], shards: Shards, options: StateOptions
) -> Iterator[InitialTensors]:
    """Yield the weights of each unit and then their shards, as fully_shard moves a unit from host memory.

    A layer is freed when it is sharded. Variables of Accelerate reference embedding and LM head until all units are.
    Source: torch 2.13 distributed/fsdp/_fully_shard/_fsdp_init.py, _move_states_to_device; _fsdp_param.py,
    _init_sharded_param; Accelerate 1.15 utils/fsdp_utils.py, fsdp2_prepare_model.
    """
    layers = sorted(unit for unit in units if unit >= 0)
    for unit in (*layers, *(unit for unit in (EMBEDDING, TAIL, ROOT) if unit in units)):
        members = units[unit]
        stays = unit < 0
        whole = tuple(_whole(parameter, options) for parameter in members)
        yield InitialTensors(mask_of("model"), whole, groups=() if stays else (unit,) * len(whole))
        yield from _shards_of(members, shards)
        if not stays:
            yield InitialTensors(mask_of("model"), (), frees=unit)


def broadcast_from_first_rank(
    ordered: Sequence[LocalParameter], shards: Shards, options: StateOptions, *, tied: bool
) -> Iterator[InitialTensors]:
    """Yield each weight in the order of the state dict, and its shard, on a rank that receives them.

    A variable references a weight until the next one is allocated. A tied LM head is a second entry of the state dict;
    its shard is freed when it is tied again. Source: Accelerate 1.15 utils/fsdp_utils.py, fsdp2_load_full_state_dict;
    torch 2.13 distributed/tensor/placement_types.py, _shard_tensor.
    """
    until = mask_of("model")
    for number, parameter in enumerate(ordered, 1):
        yield InitialTensors(until, (_whole(parameter, options),), groups=(number,), frees=number - 1)
        yield from _shards_of((parameter,), shards)
    yield InitialTensors(until, (), frees=len(ordered))
    embedding = [parameter for parameter in ordered if is_embedding(parameter)] if tied else []
    for parameter in embedding:
        yield InitialTensors(until, (_whole(parameter, options)._replace(stays=False),))
        for built in _shards_of((parameter,), shards):
            yield built._replace(mask=until, tensors=tuple(each._replace(parameter=None) for each in built.tensors))


def _whole(parameter: LocalParameter, options: StateOptions) -> InitialTensor:
    return InitialTensor(whole_bytes(parameter, options), component=Component.TEMPORARIES)


def _shards_of(parameters: Iterable[LocalParameter], shards: Shards) -> Iterator[InitialTensors]:
    for parameter in parameters:
        yield from shards[parameter]
