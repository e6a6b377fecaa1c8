"""Unsplit remainders of allocator blocks that hold model states."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from memcalc.allocator.pytorch.block_sizes import AllocationSequence, unsplit_remainders
from memcalc.layout.local_parameters import LocalParameters
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import BIT, from_phase, mask_of
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.megatron_grad_buffer import buffer_sizes, is_in_buffer, shard_sizes
from memcalc.states.optimizers.foreach_step import foreach_lists
from memcalc.states.optimizers.optimizer_states import OptimizerState, first_phase, state_dtype, unsharded_states
from memcalc.states.optimizers.step_buffers import PARTS
from memcalc.states.optimizers.step_temporaries import part_of
from memcalc.states.parameter_copies import ParameterCopy
from memcalc.states.state_options import StateOptions

# Remainders repeat from layer to layer; for layers beyond this number their average is used.
SIMULATED_LAYERS = 128
# layers in a Megatron-LM buffer; models beyond this fit on no GPU, so their remainders are ignored
MOST_LAID_OUT = 10_000


class BuildOrder(NamedTuple):
    """Tensors allocated in sequence: the phases in which they are live, and their bytes."""

    mask: int
    runs: tuple[AllocationSequence, ...]


def state_remainders(
    parameters: LocalParameters,
    options: StateOptions,
    copies: Sequence[ParameterCopy],
    states: Sequence[OptimizerState],
) -> dict[int, int]:
    """Return the bytes of unsplit remainders by phase mask, see `allocation.unsplit_tails`.

    Weights, master weights and everything else created before the first step are allocated in sequence, parameter by
    parameter; their remainders are exact. Later copies reuse blocks freed by activations. Which ones depends on the
    free lists at that point, which no formula knows. Each such copy is counted as if allocated on an empty device
    (docs/reports/accuracy.md), with the states of one parameter after those of another.
    """
    layers = max((parameter.count for parameter in parameters if parameter.where == "layer"), default=0)
    if options.engine == "megatron" and layers > MOST_LAID_OUT:
        return {}
    simulated = min(layers, SIMULATED_LAYERS)
    built = built_tensors(parameters, options, copies, states, simulated)
    first = [each for each in built if each.mask & BIT["zero_grad_1"]]
    later = [each for each in built if not each.mask & BIT["zero_grad_1"]]
    amounts = [
        *unsplit_remainders(*(each.runs for each in first)),
        *(unsplit_remainders(each.runs)[0] for each in later),
    ]
    repeats = layers > simulated and options.engine != "megatron"
    tails: dict[int, int] = {}
    for each, amount in zip([*first, *later], amounts, strict=True):
        tails[each.mask] = tails.get(each.mask, 0) + (amount * layers // simulated if repeats else amount)
    return tails


def built_tensors(
    parameters: LocalParameters,
    options: StateOptions,
    copies: Sequence[ParameterCopy],
    states: Sequence[OptimizerState],
    layers: int,
) -> list[BuildOrder]:
    """Return the copies of the parameters of `layers` layers, the optimizer states, and the lists of its step."""
    built = [*_copies(parameters, options, copies, layers), *_states(parameters, options, states, layers)]
    if states:
        step = mask_of("optimizer_step_1", "optimizer_step_2")
        lists = [
            ParameterCopy(Component.TEMPORARIES, "", options.update.dtype, 1, step, "")
            for _ in foreach_lists(options.update)
        ]
        built += _copies(parameters, options, lists, layers)
    return built


def _copies(
    parameters: LocalParameters, options: StateOptions, copies: Sequence[ParameterCopy], layers: int
) -> list[BuildOrder]:
    """Return the copies for `layers` layers, without DeepSpeed's flat buffers, which have at most one remainder."""
    found: list[BuildOrder] = []
    for copy in copies:
        shards = options.spread(copy.sharded_from_stage)
        if options.engine == "deepspeed" and options.zero_stage >= copy.sharded_from_stage:
            continue
        if options.engine == "megatron" and is_in_buffer(copy.component, options.zero_stage):
            runs = _once(buffer_sizes(parameters, copy.dtype))
        elif options.engine == "megatron" and options.zero_stage:
            runs = _once(shard_sizes(parameters, copy.dtype, options.data_parallel, options.expert_shards))
        else:
            by_part: dict[str, list[int]] = {part: [] for part in PARTS}
            for parameter in parameters:
                by_part[parameter.where].append(DTYPE_BYTES[copy.dtype] * prod(shards.copy_shape(copy, parameter)))
            runs = _in_order(by_part, layers)
        found.append(BuildOrder(copy.mask, runs))
    return found


def _states(
    parameters: LocalParameters, options: StateOptions, states: Sequence[OptimizerState], layers: int
) -> list[BuildOrder]:
    """Return the optimizer states in the order of the parameters."""
    if not states or options.flattens_weights:
        return []
    update = options.update
    if options.engine == "megatron" and options.zero_stage:
        runs = _once(shard_sizes(parameters, state_dtype(update), options.data_parallel, options.expert_shards))
        return [BuildOrder(from_phase(first_phase(update)), runs) for _ in unsharded_states(update)]
    by_part: dict[str, list[int]] = {part: [] for part in PARTS}
    for state in states:
        by_part[part_of(state.parameter, update)].append(state.item.each)
    return [BuildOrder(states[0].item.mask, _in_order(by_part, layers))]


def _once(sizes: list[int]) -> tuple[AllocationSequence, ...]:
    return (AllocationSequence(tuple(sizes)),)


def _in_order(by_part: dict[str, list[int]], layers: int) -> tuple[AllocationSequence, ...]:
    """Return the sizes of one layer, repeated `layers` times, between those of embedding and LM head."""
    times = {"embedding": 1, "layer": layers, "head": 1}
    return tuple(AllocationSequence(tuple(by_part[part]), count) for part, count in times.items())
