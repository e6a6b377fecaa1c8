"""FSDP1: FullyShardedDataParallel around each layer and the root (torch 2.13 distributed/fsdp/_runtime_utils.py).

The parameters of a unit are one flat parameter, of which each rank has a chunk (_flat_param.py). The chunk is cast on
the pre-unshard stream and gathered into the unsharded flat parameter on the unshard stream. Modules read views of it.
It is freed after forward, except the root's and at stage 2, and after the unit's backward. Autograd concatenates the
gradients of the views, when the last one exists, into a flat gradient on the unshard stream, where forward made the
views. The post-backward stream casts, pads and reduces it. Blocks that another stream uses (record_stream; autograd
records the gradients that it concatenates, too) are free once its work is done. How late that is depends on the GPU:
see `Requests.drop_used`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from memcalc.layout.flat_parameters import is_apart
from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.sharding.engine import ROOT, Engine, Gradient, OptimizerGroups
from memcalc.sharding.flat_units import THE_ROOT, UnitKey, in_order_of_end, units_in_order
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.flat_states import flat_states, is_joined, unit_of
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import EngineTensor, Requests

# CUDA streams in addition to the default one (_init_streams); the all-reduce stream exists only under HSDP.
COMPUTE, UNSHARD, POST_BACKWARD, PRE_UNSHARD, ALL_REDUCE = 0, 1, 2, 3, 4
IN_FLIGHT = 2  # freed flat parameters that the host does not wait for (_limiter_utils.py, _FreeEventQueue)
SOURCE = "torch 2.13 distributed/fsdp/"


class FlatUnitSizes(NamedTuple):
    """Allocations for one unit, in bytes; 0: there is none.

    Args:
        cast: the chunk in the compute dtype, where it is stored in another.
        unsharded: the flat parameter, gathered and padded.
        full_precision: the same in the dtype of the chunks, allocated once and freed at once, where `cast` is.
        gradient: the flat gradient.
        zeros: the gradients of the padding, which autograd concatenates, too.
        narrowed: the same in the dtype of the reduction, where it is another.
        padded: the same padded to a multiple of the ranks, where it is none.
        reduced: the rank's chunk of the reduced gradient.
        shard: the same in the dtype of the chunks, where it is another.
    """

    cast: int
    unsharded: int
    full_precision: int
    gradient: int
    zeros: tuple[int, ...]
    narrowed: int
    padded: int
    reduced: int
    shard: int


class FlatUnitLabels(NamedTuple):
    """Labels of the storages of one unit."""

    cast: EngineTensor
    unsharded: EngineTensor
    full_precision: EngineTensor
    gradient: EngineTensor
    narrowed: EngineTensor
    shard: EngineTensor


class FreeEvent(NamedTuple):
    """An event after a flat parameter is freed.

    Args:
        stream: the CUDA stream that recorded it, after an all-gather that it waited for.
        event: its number on the stream.
        reductions: the event on POST_BACKWARD of the reductions that began before that all-gather.
    """

    stream: int
    event: int
    reductions: int


class FSDP1(Engine):
    """One rank of FSDP1. Stage 3 is FULL_SHARD or HYBRID_SHARD, stage 2 SHARD_GRAD_OP.

    Args:
        requests: the list of requests to record to.
        units: the parameters of each layer and of the root, in registration order.
        choice: state options of the run.
        rank: the data-parallel rank.
    """

    keeps_gradients = False
    sum_stream = UNSHARD  # autograd runs the views' backward on the stream on which forward made them

    def __init__(
        self, requests: Requests, units: Mapping[int, Sequence[LocalParameter]], options: StateOptions, rank: int = 0
    ) -> None:
        super().__init__(requests)
        self.choice, self.rank = options, rank
        self.reshards = options.zero_stage == 3  # FULL_SHARD: after forward, and in backward without reduction
        self.output_is_loss = options.model.loss_in_model
        # Only the last micro-batch reduces, and the first one cannot prefetch.
        self.repeats = not (options.step.sums_unsharded or options.fsdp.forward_prefetch)
        self.members = units_in_order(units, options)
        known: dict[tuple[LocalParameter, ...], FlatUnitSizes] = {}
        pieces: dict[tuple[LocalParameter, ...], tuple[int, ...]] = {}
        for members in self.members.values():
            if members not in known:
                known[members] = sizes_of(members, options)
                pieces[members] = pieces_of(members, options, rank)
        self.sizes = {unit: known[members] for unit, members in self.members.items()}
        self.pieces = {unit: pieces[members] for unit, members in self.members.items()}  # of the rank, in bytes
        self.trains = {unit: any(each.trains for each in members) for unit, members in self.members.items()}
        self.labels = {unit: labels_of(unit, members, options) for unit, members in self.members.items()}
        self.hooks_modules = self.hooks_gradients = any(unit.module for unit in self.members)
        began = [*self.members]  # in the order in which forward begins the units
        ended = in_order_of_end(began)
        self.before = dict(zip(ended[1:], ended, strict=False))  # unit -> the unit that ran before it
        self.after = dict(pairwise(began))  # unit -> the unit that runs after it
        layers = sorted(unit.place for unit in began if unit.place >= 0 and not unit.module)
        self.below = dict(zip(layers[1:], layers, strict=False))  # layer -> the layer that ran before it
        self.unsharded: dict[UnitKey, int] = {}  # unit -> the gathered flat parameter
        self.sums: dict[UnitKey, int] = {}  # unit -> flat gradient of earlier micro-batches, not reduced
        self.awaits_backward: set[UnitKey] = set()  # units that have run forward, but not begun backward
        self.in_backward = False
        self.running: UnitKey | None = None  # the module that runs, of those that are units
        self.runs_forward = True  # whether it runs forward, or again
        self.ready: list[Gradient] = []  # its gradients
        self.ended: UnitKey | None = None  # a module that has ended before its gradients exist
        self.of_layer: list[Gradient] = []  # gradients of its unit
        self.joined: list[tuple[int, int]] = []  # a layer, and a gradient in it that is the root's, until its end
        self.reduced: list[int] = []  # gradient shards of modules, until backward of their layer ends
        self.have_gradients = False
        self.has_body = options.fsdp.has_body
        self.before_layers = {unit for unit, members in self.members.items() if members[0].where == "embedding"}
        self.reduces = True
        self.is_initialized = False
        self.knows_order = False  # whether a batch has recorded the order of units (_exec_order_utils.py)
        self.prefetched: set[UnitKey] = set()  # units that are unsharded ahead of time
        self.frees: deque[FreeEvent] = deque()  # after frees of flat parameters, for which the host has not waited
        self.gathers: dict[UnitKey, int] = {}  # unit -> event of the reductions that began before its last all-gather
        self.last_gather = 0  # the same of the last all-gather
        self.is_any = False  # whether the micro-batch stands for any of the step

    def updated(self, groups: OptimizerGroups) -> OptimizerGroups:
        """Return flat parameters, or with use_orig_params the rank's part of each parameter."""
        return [flat_states(parameters, options, self.rank)[1:] for parameters, options in groups]

    def existing(self) -> list[int]:
        """Record the flat gradients of earlier micro-batches, which the last one reduces."""
        for unit, sizes in self.sizes.items() if self.choice.step.sums_unsharded else ():
            if self.trains[unit]:
                with self.requests.repeat(self.rounds.get(unit.place, 1)):
                    self.sums[unit] = self.requests.take(sizes.gradient, UNSHARD, self.labels[unit].gradient)
        return []

    def resume(self) -> None:
        """Skip the initialization, which precedes the first step.

        The micro-batch stands for any of the step: sums are live until the root's backward, as in a micro-batch that
        does not reduce, and gradients are reduced, as in the last one. At stage 2 a micro-batch that does not reduce
        leaves all units unsharded.
        """
        self.is_initialized = self.is_any = self.knows_order = True
        if self.choice.step.sums_unsharded and not self.reshards:
            for unit in self.sizes:
                with self.requests.repeat(self.rounds.get(unit.place, 1)):
                    self._unshard(unit)

    def prepare(self) -> None:
        """Initialize all units before the first forward: allocate each buffer once, and free it.

        Source: _flat_param.py, init_flat_param_attributes.
        """
        if self.is_initialized:
            return
        self.is_initialized = True
        for unit, sizes in self.sizes.items():
            labels = self.labels[unit]
            buffers = (
                (sizes.cast, labels.cast),
                (sizes.unsharded, labels.unsharded),
                (sizes.full_precision, labels.full_precision),
            )
            for size, label in buffers:
                if size:
                    self.requests.drop((self.requests.take(size, 0, label),))

    def begin(self, *, have_gradients: bool, last: bool) -> None:
        """Begin a micro-batch."""
        self.have_gradients = have_gradients
        self.reduces = last or not self.choice.step.sums_unsharded

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def before_forward(self, unit: int) -> None:
        """Begin the forward of a layer or the root."""
        self.in_backward = False
        self._begin_forward(UnitKey(unit))

    def after_forward(self, unit: int) -> None:
        """End the forward of a layer or the root."""
        self._end_forward(UnitKey(unit))

    def after_evaluation(self) -> None:
        """Free the flat parameters that stay unsharded after forward, such as the root's.

        In PyTorch they stay until the next training step; they are freed here, since its forward gathers them.
        """
        self._drop_all(self.unsharded)
        self.prefetched.clear()

    def omit_backward(self) -> None:
        """Keep the root gathered after the first forward, which only a backward frees. Source: _post_forward."""
        super().omit_backward()
        self.repeats = False  # the first forward gathers it

    def before_backward(self, unit: int) -> None:
        """Begin the backward of a layer or the root."""
        self.in_backward = True
        if not self.has_body:
            self._begin_backward(UnitKey(unit))
        elif unit != ROOT:
            self._begin_backward(THE_ROOT)
            self._begin_backward(UnitKey(unit))

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:
        """End the backward of a layer or the root; return its gradient shards and those of its modules."""
        found = UnitKey(unit)
        if unit == ROOT:
            self.knows_order = True
            self.prefetched.clear()  # _runtime_utils.py, _post_backward_final_callback
        if self.trains.get(found, True):
            self._end_backward(found, gradients)
        else:
            self._reshard_frozen(found)
        shards, self.reduced = self.reduced, []
        return shards

    def module_of(self, unit: int, name: str) -> str:
        """Return the module if it is a unit."""
        return name if UnitKey(unit, name) in self.sizes else ""

    def before_module(self, unit: int, module: str, *, again: bool) -> None:
        """Begin the forward or backward of a module that is a unit."""
        self.running, self.runs_forward = UnitKey(unit, module), again or not self.in_backward
        if self.runs_forward:
            if self.has_body and self.running not in self.before_layers:
                self._end_forward(THE_ROOT)
            self._begin_forward(self.running)
        else:
            self._begin_backward(self.running)

    def after_module(self) -> None:
        """End the forward or backward of a module that is a unit."""
        unit, self.running = self.running, None
        if unit is not None and self.runs_forward:
            self._end_forward(unit)
        elif unit is not None and self.choice.fsdp.trained_apart and len(self.ready) < len(self.members[unit]):
            self.ended = unit
        elif unit is not None:
            self._end_module(unit)

    def _end_module(self, unit: UnitKey) -> None:
        gradients, self.ready, self.ended = self.ready, [], None
        self._end_backward(unit, gradients)

    def gradient_ready(self, gradient: Gradient) -> None:
        """Take over a gradient of the module that runs, until its backward ends, or else until that of its layer.

        Autocast's cast of a weight has its backward after that of the module: then the unit ends with it.
        """
        fsdp = self.choice.fsdp
        is_apart_here = gradient.parameter is None or is_apart(gradient.parameter, fsdp.least_apart)
        (self.ready if fsdp.trained_apart or is_apart_here else self.of_layer).append(gradient)
        if self.ended is not None and len(self.ready) == len(self.members[self.ended]):
            self._end_module(self.ended)

    # -- units ---------------------------------------------------------------------------------------------------------

    def _begin_forward(self, unit: UnitKey) -> None:
        """Pre-forward: unshard, unless an earlier pass has left the unit unsharded; prefetch the next unit."""
        self._unshard(unit)
        following = self.after.get(unit)
        if following is not None and self.choice.fsdp.forward_prefetch and self.knows_order:
            self._unshard(following)
            self.prefetched.add(following)

    def _end_forward(self, unit: UnitKey) -> None:
        """Post-forward: free the unsharded flat parameter, except the root's. Source: _post_forward_reshard."""
        self.awaits_backward.add(unit)
        stays = unit == THE_ROOT and not self.has_body
        if not stays and self.reshards and unit in self.unsharded:
            self._free(unit, COMPUTE)

    def _begin_backward(self, unit: UnitKey) -> None:
        """Pre-backward: unshard unless prefetched; prefetch the unit that ran before. Source: _pre_backward_hook."""
        self.awaits_backward.discard(unit)
        self._unshard(unit)
        if self.choice.fsdp.backward_prefetch == "pre":
            self._prefetch(unit)

    def _end_backward(self, unit: UnitKey, gradients: Sequence[Gradient]) -> None:
        """Post-backward: concatenate gradients, reshard, prefetch, reduce. Source: _post_backward_hook."""
        flat: list[int] = []
        if not unit.module:
            gradients, self.of_layer = self._without_joined(unit, [*self.of_layer, *gradients]), []
        complete = unit == THE_ROOT and bool(self.joined)
        if (gradients or complete) and unit in self.sizes:  # ATen FunctionsManual.cpp, split_with_sizes_backward
            sizes, label, take = self.sizes[unit], self.labels[unit].gradient, self.requests.take
            zeros = [take(size, UNSHARD, label) for size in sizes.zeros]
            flat = [take(sizes.gradient, UNSHARD, label)]
            self.requests.drop(zeros)
        if complete:
            self._drop_joined()
        self.requests.drop_used((each.storage for each in gradients), UNSHARD)
        self._reshard(unit)
        if not flat:
            return
        if not self.reduces:
            self._add_up(unit, flat)
            return
        if self.is_any and unit == THE_ROOT:
            self._drop_all(self.sums, but=THE_ROOT)
            self._drop_all(self.unsharded)
        added: list[int] = []
        if unit in self.sums and not (self.is_any and unit != THE_ROOT):
            flat, added = [self.sums.pop(unit)], flat
        self.reduced += self._reduce(unit)
        self.requests.drop_used(flat, POST_BACKWARD)
        self.requests.drop(added)

    def _without_joined(self, unit: UnitKey, gradients: Sequence[Gradient]) -> Sequence[Gradient]:
        """Keep gradients of a layer's parts that are the root's, until all of its unit exist; return the others."""
        joined = [each for each in gradients if each.parameter and is_joined(each.parameter, self.choice.fsdp)]
        self.joined += ((unit.place, each.storage) for each in joined)
        return [each for each in gradients if each not in joined] if joined else gradients

    def _drop_joined(self) -> None:
        for place, storage in self.joined:
            with self.requests.repeat(self.rounds.get(place, 1)):
                self.requests.drop((storage,))
        self.joined = []

    def _reshard_frozen(self, unit: UnitKey) -> None:
        """Reshard a unit without gradients. Source: _register_post_backward_reshard_only_hook.

        The hook is on the gradient of the unit's input, after the one that begins the backward of the layer below. The
        first layer has none where its input needs no gradient, and the root has none: the end of backward reshards them
        (_post_backward_final_callback).
        """
        if unit == THE_ROOT:
            if self.is_any:
                self._drop_all(self.sums)
            if self._frees_in_backward(unit):
                self._drop_all(self.unsharded)
        elif unit.place in self.below:
            self._begin_backward(UnitKey(self.below[unit.place]))
            self._reshard(unit)
        elif not self.choice.model.detached:
            self._reshard(unit)

    def _reshard(self, unit: UnitKey) -> None:
        """Free the unsharded flat parameter, and prefetch. Source: _post_backward_reshard."""
        if unit in self.unsharded and self._frees_in_backward(unit):
            self._free(unit, UNSHARD)
        self.prefetched.discard(unit)
        # the layers have run backward before the root
        if self.choice.fsdp.backward_prefetch == "post" and unit != THE_ROOT:
            self._prefetch(unit)

    def _drop_used(self, storages: Sequence[int], own: int, stream: int) -> None:
        """Free storages of one stream that a stream, perhaps another one, still uses."""
        if stream == own:
            self.requests.drop(storages)
        else:
            self.requests.drop_used(storages, stream)

    def _free(self, unit: UnitKey, stream: int) -> None:
        """Free the unsharded flat parameter. Source: _runtime_utils.py, _reshard.

        Args:
            unit: the unit.
            stream: the one that the host is on: COMPUTE after forward; UNSHARD in the hook after backward, because
                autograd runs it on the stream on which forward made the views of the flat parameter.
        """
        self._drop_used((self.unsharded.pop(unit),), UNSHARD, stream)
        before = self.last_gather if stream == UNSHARD else self.gathers[unit]
        self.frees.append(FreeEvent(stream, self.requests.event(stream), before))
        self.prefetched.discard(unit)

    def _frees_in_backward(self, unit: UnitKey) -> bool:
        """Return whether a unit is resharded after its backward. Source: _should_free_in_backward."""
        if self.is_any and self.choice.step.sums_unsharded and unit != THE_ROOT:
            return self.reshards
        return self.reduces or self.reshards

    def _drop_all(self, storages: dict[UnitKey, int], but: UnitKey | None = None) -> None:
        """Free a storage of each unit."""
        for unit in [each for each in storages if each != but]:
            with self.requests.repeat(self.rounds.get(unit.place, 1)):
                self.requests.drop((storages.pop(unit),))

    def _add_up(self, unit: UnitKey, flat: list[int]) -> None:
        """Keep a flat gradient, or add it to the one of earlier micro-batches.

        The first one of a step also makes a gradient of each part of a parameter, which then becomes a view of the flat
        one (_flat_param.py, _use_unsharded_grad_views).
        """
        if unit in self.sums:  # AccumulateGrad adds in place
            self.requests.drop(flat)
            return
        self.sums[unit] = flat[0]
        for size in self.pieces.get(unit, ()):
            self.requests.drop((self.requests.take(size, UNSHARD, self.labels[unit].shard),))

    def _prefetch(self, unit: UnitKey) -> None:
        """Unshard the unit that ran before, if its backward has not begun. Source: _get_handle_to_prefetch."""
        before = self.before.get(unit)
        if before in self.awaits_backward:
            self._unshard(before)
            self.prefetched.add(before)

    def _unshard(self, unit: UnitKey) -> None:
        """Cast and gather a unit. Source: _runtime_utils.py, _unshard; _flat_param.py, pre_unshard to post_unshard.

        Before, the host waits until all but one of the flat parameters freed so far are free (_limiter_utils.py).
        """
        if unit not in self.sizes or unit in self.prefetched:
            return
        sizes, labels, take = self.sizes[unit], self.labels[unit], self.requests.take
        is_sharded = unit not in self.unsharded
        cast = [take(sizes.cast, PRE_UNSHARD, labels.cast)] if sizes.cast and is_sharded else []
        if len(self.frees) >= IN_FLIGHT:
            free = self.frees.popleft()
            self.requests.wait_for(free.stream, free.event)
            if self.requests.collectives_in_order:
                self.requests.wait_for(POST_BACKWARD, free.reductions)
        if is_sharded:
            self.gathers[unit] = self.last_gather = self.requests.event(POST_BACKWARD)
            self.unsharded[unit] = take(sizes.unsharded, UNSHARD, labels.unsharded)
        self.requests.drop_used(cast, UNSHARD)

    def _reduce(self, unit: UnitKey) -> list[int]:
        """Reduce-scatter a unit's flat gradient; return the shard, unless it is added to an earlier one.

        Source: _runtime_utils.py, _reduce_grad, _get_reduce_scatter_tensors, _accumulate_sharded_grad.
        """
        sizes, labels, take = self.sizes[unit], self.labels[unit], self.requests.take
        used = [take(size, POST_BACKWARD, labels.narrowed) for size in (sizes.narrowed, sizes.padded) if size]
        shard = take(sizes.reduced, POST_BACKWARD, labels.shard)
        if sizes.shard:  # _cast_grad_to_param_dtype
            stream = ALL_REDUCE if self.choice.replicates else POST_BACKWARD
            reduced, shard = shard, take(sizes.shard, stream, labels.shard)
            self._drop_used((reduced,), POST_BACKWARD, stream)
        kept = [shard]
        if self.have_gradients:
            self.requests.drop(kept)
            kept = []
        self.requests.drop(reversed(used))
        return kept


def sizes_of(parameters: tuple[LocalParameter, ...], options: StateOptions) -> FlatUnitSizes:
    """Return the allocations for a unit."""
    flat, ranks = unit_of(parameters, options), options.data_parallel
    own = parameters[0].dtype or options.base
    compute = options.fsdp.gathered or own
    reduced = options.fsdp.reduced or own
    stored, read, summed = DTYPE_BYTES[own], DTYPE_BYTES[compute], DTYPE_BYTES[reduced]
    gathered = flat.shard * ranks
    return FlatUnitSizes(
        cast=flat.shard * read if compute != own else 0,
        unsharded=gathered * read,
        full_precision=gathered * stored if compute != own else 0,
        gradient=flat.elements * read,
        zeros=tuple(elements * read for elements in flat.padding),
        narrowed=flat.elements * summed if reduced != compute else 0,
        padded=gathered * summed if gathered != flat.elements else 0,
        reduced=flat.shard * summed,
        shard=flat.shard * stored if reduced != own else 0,
    )


def pieces_of(parameters: tuple[LocalParameter, ...], options: StateOptions, rank: int) -> tuple[int, ...]:
    """Return the bytes of a rank's part of each parameter of a unit, if the optimizer updates such parts."""
    if not options.fsdp.use_orig_params:
        return ()
    size = DTYPE_BYTES[parameters[0].dtype or options.base]
    return tuple(size * elements for elements in unit_of(parameters, options).pieces(rank) if elements)


def labels_of(unit: UnitKey, parameters: tuple[LocalParameter, ...], options: StateOptions) -> FlatUnitLabels:
    """Return the labels of a unit's storages."""
    name, symbol = ("the root", "P_root") if unit == THE_ROOT else ("a layer", "P_layer")
    if unit.module:
        name, symbol = "a trained module", "P_module"
    own = parameters[0].dtype or options.base
    compute, reduced = options.fsdp.gathered or own, options.fsdp.reduced or own

    def label(tensor: str, dtype: str, symbol: str, rule: str, component: Component) -> EngineTensor:
        return EngineTensor(component, tensor, dtype, symbol, f"{SOURCE}{rule}")

    buffers, gradients = Component.COMMUNICATION_BUFFERS, Component.GRADIENTS
    flat, runtime = "_flat_param.py: ", "_runtime_utils.py: "
    return FlatUnitLabels(
        label(f"shard of {name}, cast", compute, f"{symbol}/N", f"{flat}_use_low_precision_shard", buffers),
        label(f"flat parameter of {name}, gathered", compute, symbol, f"{flat}unshard", buffers),
        label(f"flat parameter of {name}, made once", own, symbol, f"{flat}init_flat_param_attributes", buffers),
        label(f"flat gradient of {name}", compute, symbol, f"{runtime}_post_backward_hook", gradients),
        label(f"reduce-scatter input of {name}", reduced, symbol, f"{runtime}_post_backward_hook", buffers),
        label(f"gradient shard of {name}", own, f"{symbol}/N", f"{runtime}_reduce_grad", gradients),
    )
