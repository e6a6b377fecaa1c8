"""FSDP2: fully_shard around each layer and around the root (torch 2.13 distributed/fsdp/_fully_shard/).

Each unit's parameters are gathered into one buffer on the all-gather stream and copied out of it on the default stream.
In forward that buffer stays until the next unit has been copied out, so that the copy overlaps with the next
all-gather; in backward it is freed after the copy-out, and the unit before is prefetched. Gradients are copied into the
input of a reduce-scatter, which stays until the next unit's, and reduced into an output on the reduce-scatter stream,
of which the sharded gradients are views. Under CPUOffloadPolicy shards come from the host one by one on their way into
the all-gather, and gradients are copied to it at once; the optimizer runs there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from memcalc.estimation.choice import Choice
from memcalc.estimation.engines.fsdp2 import is_narrow
from memcalc.estimation.sharding import Held, Parameters
from memcalc.ledger.component import Component
from memcalc.sharding.engine import ROOT, Engine, Gradient
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.stream.requests import Requests
from memcalc.workspaces.sharding import chunk_cat, split_copy

ALL_GATHER, REDUCE_SCATTER = 1, 2  # CUDA streams beside the default one (_fsdp_param_group.py, FSDPCommContext)
HOLDS_BOTH_INPUTS = (2, 12)  # the release that frees a reduce-scatter's input only when the next one exists


class Gather(NamedTuple):
    """What gathering one unit allocates, in bytes.

    Args:
        fetched: shards that come from the host, one by one, each of which is cast where there are `copies`.
        copies: on the way into the all-gather: shards cast to the compute dtype, all at once where none is fetched.
        output: the buffer that all ranks' shards arrive in.
        parameters: each parameter that is copied out of it.
        table: scratch of the kernel that copies them out.
    """

    fetched: tuple[int, ...]
    copies: tuple[int, ...]
    output: int
    parameters: tuple[int, ...]
    table: tuple[int, ...]


class Reduce(NamedTuple):
    """What reducing the gradients of one unit allocates, in bytes.

    Args:
        source: the input of the reduce-scatter.
        output: the rank's share.
        table: scratch of the kernel that copies gradients in.
        last: the parameter whose gradient a loop variable holds until the output exists.
    """

    source: int
    output: int
    table: tuple[int, ...]
    last: Held


class FSDP2(Engine):
    """One rank of FSDP2. Stage 3 is reshard_after_forward=True, stage 2 False; the root is never resharded in forward.

    Args:
        requests: where they are written.
        units: the parameters of each unit, in registration order.
        choice: of the run.
    """

    keeps_gradients = False

    def __init__(self, requests: Requests, units: Mapping[int, Sequence[Held]], choice: Choice) -> None:
        super().__init__(requests)
        self.choice = choice
        known: dict[Sequence[Held], tuple[Gather, Reduce | None]] = {}
        for parameters in units.values():
            if parameters not in known:
                known[parameters] = self._gather_of(parameters), self._reduce_of(parameters)
        self.sizes = {unit: known[parameters] for unit, parameters in units.items()}
        self.last = max(units)
        self.gathering: dict[int, int] = {}  # all-gather outputs that are not copied out yet, by unit
        self.parameters: dict[int, list[int]] = {}  # gathered parameters, by unit
        self.copied: list[int] = []  # the last all-gather output of forward, which is copied out
        self.reducing: list[int] = []  # the input of the last reduce-scatter
        self.added_up: list[int] = []  # what HSDP's groups have added up, on its way to the host
        self.have_gradients = False

    def updated(self, groups: Sequence[tuple[Parameters, Choice]]) -> Sequence[tuple[Parameters, Choice]]:
        """What the optimizer updates: nothing on the device, where shards are on the host."""
        return () if self.choice.weights_on_host else groups

    def begin(self, *, have_gradients: bool) -> None:
        """Begin a micro-batch."""
        self.have_gradients = have_gradients

    def before_forward(self, unit: int) -> None:
        """Pre-forward: unshard, wait_for_unshard."""
        self._all_gather(unit)
        output = self._copy_out(unit)
        self.requests.drop(self.copied)
        self.copied = [output]

    def after_forward(self, unit: int) -> None:
        """Post-forward: reshard; the root frees the last all-gather output."""
        if unit == ROOT:
            self.requests.drop(self.copied)
            self.copied = []
        elif self.choice.zero_stage > 2 and not (unit == self.last and self.choice.mixed_policy):
            self.requests.drop(self.parameters.pop(unit))

    def before_backward(self, unit: int) -> None:
        """Pre-backward: unshard unless prefetched, wait_for_unshard, prefetch the unit that ran before."""
        if unit not in self.parameters:
            if unit not in self.gathering:
                self._all_gather(unit)
            self.requests.drop((self._copy_out(unit),))
        following = self.last if unit == ROOT else unit - 1
        if following >= 0 and following not in self.parameters:
            self._all_gather(following)

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:
        """Post-backward: reshard, free the last reduce-scatter's input, reduce; the root's is the final callback."""
        self.requests.drop(self.parameters.pop(unit))
        before, self.reducing = self.reducing, []
        if self.choice.torch[:2] != HOLDS_BOTH_INPUTS:
            self.requests.drop(before)
            before = []
        reduce = self.sizes[unit][1]
        kept = self._reduce(reduce, gradients) if reduce is not None and gradients else []
        self.requests.drop(before)
        if unit == ROOT:
            self.requests.drop((*self.reducing, *self.added_up))
            self.reducing, self.added_up = [], []
        return kept

    def _all_gather(self, unit: int) -> None:
        """Source: _fsdp_collectives.py, foreach_all_gather."""
        gather = self.sizes[unit][0]
        copies = [] if gather.fetched else [self.requests.take(size, ALL_GATHER) for size in gather.copies]
        for index, size in enumerate(gather.fetched):  # _fsdp_param.py, all_gather_inputs
            copies.append(self.requests.take(size, ALL_GATHER))
            if gather.copies:
                wide = copies.pop()
                copies.append(self.requests.take(gather.copies[index], ALL_GATHER))
                self.requests.drop((wide,))
        self.gathering[unit] = self.requests.take(gather.output, ALL_GATHER)
        self.requests.drop(copies)

    def _copy_out(self, unit: int) -> int:
        """Allocate the parameters; return the all-gather output. Source: foreach_all_gather_copy_out."""
        gather = self.sizes[unit][0]
        self.parameters[unit] = [self.requests.take(size) for size in gather.parameters]
        self.requests.drop((self.requests.play(gather.table),))
        return self.gathering.pop(unit)

    def _reduce(self, reduce: Reduce, gradients: Sequence[Gradient]) -> list[int]:
        """Source: _fsdp_collectives.py, foreach_reduce."""
        self.reducing = [self.requests.take(reduce.source)]
        self.requests.drop((self.requests.play(reduce.table),))
        last = [each.storage for each in gradients if each.parameter == reduce.last]
        self.requests.drop(each.storage for each in gradients if each.storage not in last)
        output = self.requests.take(reduce.output, REDUCE_SCATTER, Component.GRADIENTS)
        self.requests.drop(last)
        if not (self.have_gradients or self.choice.weights_on_host):
            return [output]
        if self.choice.weights_on_host and self.choice.replicates:  # _fsdp_param_group.py, _all_reduce_state
            self.added_up.append(output)
        else:  # it was added to the gradients of earlier micro-batches, or copied to the host
            self.requests.drop((output,))
        return []

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def _shard_elements(self, held: Held) -> int:
        """Elements of a rank's shard: rows are rounded up, and padded on the last ranks."""
        return prod(self.choice.spread(2).shape(held))

    def _gather_of(self, parameters: Sequence[Held]) -> Gather:
        choice = self.choice
        usual = choice.compute if choice.mixed_policy else choice.base
        dtypes = ["uint8" if is_narrow(held, choice) else held.dtype or usual for held in parameters]
        parts = [
            self._shard_elements(held) * DTYPE_BYTES[dtype] for held, dtype in zip(parameters, dtypes, strict=True)
        ]
        ranks = choice.data_parallel
        gathered = tuple(part * ranks for part in parts)
        fetched: tuple[int, ...] = ()
        copies: tuple[int, ...] = (sum(parts),) if choice.mixed_policy else ()
        if choice.weights_on_host:
            held_in = [held.dtype or choice.base for held in parameters]
            fetched = tuple(self._shard_elements(h) * DTYPE_BYTES[d] for h, d in zip(parameters, held_in, strict=True))
            copies = tuple(parts) if choice.mixed_policy else ()
        return Gather(fetched, copies, sum(gathered), gathered, tuple(split_copy(parts, ranks, choice.card)))

    def _reduce_of(self, parameters: Sequence[Held]) -> Reduce | None:
        trained = [held for held in parameters if held.trains]
        if not trained:
            return None
        choice = self.choice
        usual = choice.compute if choice.mixed_policy else choice.base
        dtype = "fp32" if choice.mixed_policy else trained[-1].dtype or usual
        parts = [self._shard_elements(held) * DTYPE_BYTES[dtype] for held in trained]
        output = sum(parts)
        return Reduce(output * choice.data_parallel, output, tuple(chunk_cat(parts)), trained[-1])
