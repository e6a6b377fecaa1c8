"""Unsplit remainders of allocator blocks that hold model states."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from memcalc.estimation.allocation import Run, unsplit_tails
from memcalc.estimation.choice import Choice
from memcalc.estimation.copies import Copy
from memcalc.estimation.engines.gradient_buffer import buffer_sizes, lies_in_a_buffer, shard_sizes
from memcalc.estimation.items import BIT, from_phase, mask_of
from memcalc.estimation.optimizers.buffers import PARTS
from memcalc.estimation.optimizers.lists import foreach_lists
from memcalc.estimation.optimizers.states import State, first_phase, state_dtype, whole_states
from memcalc.estimation.optimizers.temporaries import part_of
from memcalc.estimation.sharding import Parameters
from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES

# Remainders repeat from layer to layer; for layers beyond this number their average is used.
SIMULATED_LAYERS = 128
# layers in a Megatron-LM buffer; models beyond this fit on no GPU, so their remainders are ignored
MOST_LAID_OUT = 10_000


class Built(NamedTuple):
    """Tensors allocated in sequence: the phases in which they are live, and their bytes."""

    mask: int
    runs: tuple[Run, ...]

    @property
    def sizes(self) -> list[int]:
        """The bytes of each tensor."""
        return [size for run in self.runs for size in run.sizes * run.times]


def state_tails(
    parameters: Parameters, choice: Choice, copies: Sequence[Copy], states: Sequence[State]
) -> dict[int, int]:
    """Return the bytes of unsplit remainders by phase mask, see `allocation.unsplit_tails`.

    Weights, master weights and everything else created before the first step are allocated in sequence, parameter by
    parameter; their remainders are exact. Later copies reuse blocks freed by activations. Which ones depends on the
    free lists at that point, which no formula knows. Each such copy is counted as if allocated on an empty device
    (docs/reports/accuracy.md), with the states of one parameter after those of another.
    """
    layers = max((held.count for held in parameters if held.where == "layer"), default=0)
    if choice.engine == "megatron" and layers > MOST_LAID_OUT:
        return {}
    simulated = min(layers, SIMULATED_LAYERS)
    built = built_tensors(parameters, choice, copies, states, simulated)
    first = [each for each in built if each.mask & BIT["zero_grad_1"]]
    later = [each for each in built if not each.mask & BIT["zero_grad_1"]]
    amounts = [*unsplit_tails(*(each.runs for each in first)), *(unsplit_tails(each.runs)[0] for each in later)]
    repeats = layers > simulated and choice.engine != "megatron"
    tails: dict[int, int] = {}
    for each, amount in zip([*first, *later], amounts, strict=True):
        tails[each.mask] = tails.get(each.mask, 0) + (amount * layers // simulated if repeats else amount)
    return tails


def built_tensors(
    parameters: Parameters, choice: Choice, copies: Sequence[Copy], states: Sequence[State], layers: int
) -> list[Built]:
    """Return the copies of the parameters of `layers` layers, the optimizer states, and the lists of its step."""
    built = [*_copies(parameters, choice, copies, layers), *_states(parameters, choice, states, layers)]
    if states:
        step = mask_of("optimizer_step_1", "optimizer_step_2")
        lists = [
            Copy(Component.TEMPORARIES, "", choice.update.dtype, 1, step, "") for _ in foreach_lists(choice.update)
        ]
        built += _copies(parameters, choice, lists, layers)
    return built


def _copies(parameters: Parameters, choice: Choice, copies: Sequence[Copy], layers: int) -> list[Built]:
    """Return the copies for `layers` layers, without DeepSpeed's flat buffers, which have at most one remainder."""
    found: list[Built] = []
    for copy in copies:
        spread = choice.spread(copy.sharded_from_stage)
        if choice.engine == "deepspeed" and spread.ranks > 1:
            continue
        if choice.engine == "megatron" and lies_in_a_buffer(copy.component, choice.zero_stage):
            runs = _once(buffer_sizes(parameters, copy.dtype))
        elif choice.engine == "megatron" and choice.zero_stage:
            runs = _once(shard_sizes(parameters, copy.dtype, choice.data_parallel, choice.expert_shards))
        else:
            by_part: dict[str, list[int]] = {part: [] for part in PARTS}
            for held in parameters:
                by_part[held.where].append(DTYPE_BYTES[copy.dtype] * prod(spread.copy_shape(copy, held)))
            runs = _in_order(by_part, layers)
        found.append(Built(copy.mask, runs))
    return found


def _states(parameters: Parameters, choice: Choice, states: Sequence[State], layers: int) -> list[Built]:
    """Return the optimizer states in the order of the parameters."""
    if not states or (choice.engine == "deepspeed" and choice.spread(1).ranks > 1):
        return []
    update = choice.update
    if choice.engine == "megatron" and choice.zero_stage:
        runs = _once(shard_sizes(parameters, state_dtype(update), choice.data_parallel, choice.expert_shards))
        return [Built(from_phase(first_phase(update)), runs) for _ in whole_states(update)]
    by_part: dict[str, list[int]] = {part: [] for part in PARTS}
    for state in states:
        by_part[part_of(state.held, update)].append(state.item.each)
    return [Built(states[0].item.mask, _in_order(by_part, layers))]


def _once(sizes: list[int]) -> tuple[Run, ...]:
    return (Run(tuple(sizes)),)


def _in_order(by_part: dict[str, list[int]], layers: int) -> tuple[Run, ...]:
    """Return the sizes of one layer, repeated `layers` times, between those of embedding and LM head."""
    times = {"embedding": 1, "layer": layers, "head": 1}
    return tuple(Run(tuple(by_part[part]), count) for part, count in times.items())
