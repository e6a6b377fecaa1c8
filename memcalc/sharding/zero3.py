"""ZeRO stage 3 (DeepSpeed 0.19 runtime/zero/), one rank.

Before a module runs, its parameters are gathered; from the second micro-batch on, parameters of the next modules are
prefetched, too. After the module they are freed, unless they are used again soon. Parameters of a few elements stay
from the first step on. All of these are allocated on the all-gather stream. Gradients are copied into a persistent
bucket, and reduced on a third stream into one persistent buffer of the rank's shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.sharding.engine import ROOT, Engine, Gradient, OptimizerGroups
from memcalc.sharding.parameter_groups import parameter_groups
from memcalc.sharding.zero3_order import ModuleTurn
from memcalc.sharding.zero12 import FLOAT, REDUCE, SOURCE, flat_tensor, norms, reduction_labels
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.optimizer_step import SUB_GROUP
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import EngineTensor, Requests

MOST_LIVE = 1_000_000_000  # stage3_max_live_parameters: above it nothing is prefetched
REUSE_DISTANCE = 1_000_000_000  # stage3_max_reuse_distance: parameters used again within this distance stay
GATHER = 1  # the CUDA stream of all-gathers with overlap_comm, in addition to that of reductions: parameter_offload.py
REFERENCE_GATHER = 3  # the stream of all-gathers of a reference model, which has its own engine


class GatherGroup:
    """Parameters that are gathered together, one output buffer for each dtype.

    All are copied out of the buffers when the first one is needed.

    Args:
        members: their numbers, by dtype, then in the order of modules.
        buffers: the storages of the outputs; a single parameter uses its buffer directly.
    """

    def __init__(self, members: Sequence[int], buffers: Sequence[int]) -> None:
        self.members = members
        self.buffers = buffers
        self.waiting = set(members)
        self.copied = len(members) == 1


class BucketGradient(NamedTuple):
    """A gradient in the bucket: its parameter's number, and its storage if it was too large to be copied."""

    number: int
    storage: int | None


class HookedModules(NamedTuple):
    """The modules of a micro-batch, and the releases of their parameters.

    Args:
        turns: all modules in order; their parameters are positions in registration order.
        scoring: those of a forward without adapters and gradients, between loss and backward; empty without it.
        views_experts: whether autograd saves views of the routed experts' weights.
        frees_leftovers: whether parameters of modules that have not ended in backward are freed after it.
        keeps_recomputed: whether frozen parameters of a recomputation stay until the module ends that began it.
        reentrant: whether a recomputation runs a backward of its own.
    """

    turns: Sequence[ModuleTurn]
    scoring: Sequence[ModuleTurn] = ()
    views_experts: bool = True
    frees_leftovers: bool = True
    keeps_recomputed: bool = True
    reentrant: bool = False


class ZeRO3(Engine):
    """One rank at ZeRO stage 3.

    Args:
        requests: where they are recorded.
        ordered: all parameters, in registration order.
        calls: the modules of a micro-batch, and what happens to their parameters.
        options: state options of the run.
    """

    hooks_gradients = hooks_modules = frees_gradients = True
    keeps_gradients = repeats = False

    def __init__(
        self,
        requests: Requests,
        ordered: Sequence[LocalParameter],
        calls: HookedModules,
        options: StateOptions,
    ) -> None:
        super().__init__(requests)
        self.choice = options
        self.calls = calls
        self.scores_itself = bool(calls.scoring)
        self.labels = reduction_labels(options)
        source = f"{SOURCE}partitioned_param_coordinator.py"
        component = Component.COMMUNICATION_BUFFERS
        self.gathered = EngineTensor(component, "parameters, gathered", options.compute, "P_gathered", source)
        self.ordered = ordered
        self.ranks = options.data_parallel
        self.dtype_bytes = DTYPE_BYTES[options.compute]  # of gradients and their bucket
        self.summed = FLOAT if options.sums_shards else self.dtype_bytes
        self.dtypes = [parameter.dtype or options.compute for parameter in ordered]
        self.elements = [parameter.elements for parameter in ordered]
        self.shares = [-(-elements // self.ranks) for elements in self.elements]
        self.trained = [number for number, parameter in enumerate(ordered) if parameter.trains]
        self.groups = parameter_groups(ordered, self.trained, options.zero)
        overlaps = options.zero.overlaps(options.zero_stage)
        self.gather, self.reduce = (GATHER, REDUCE) if overlaps else (0, 0)
        self.there: dict[int, int] = {}  # gathered parameter -> storage
        self.views: dict[int, int] = {}  # parameters that autograd still has views of -> storage
        # Frozen parameters that wait for the end of the module that recomputes them.
        self.recomputed: dict[int, None] = {}
        self.arriving: dict[int, GatherGroup] = {}
        self.live = 0  # elements, counted for the limit on prefetching
        self.begun = 0  # micro-batches
        self.knows_readers = False  # whether it is known which parameters of other modules a module reads
        self.in_order = False  # whether modules run in the recorded order, so that DeepSpeed prefetches
        self.leaves_order = -1  # the turn that is not in the recorded order
        self.turn = 0
        self._trace(calls.turns)
        self.kept: frozenset[int] = frozenset()  # parameters that are not freed, besides small ones
        self.output_is_loss = bool(self.readers)
        self.running: ModuleTurn | None = None
        self.queue: deque[tuple[int, int]] = deque()
        self.fetched_for: dict[int, int] = {}
        self.positions: dict[LocalParameter, deque[int]] = {}
        self.bucket: list[BucketGradient] = []
        self.inside = 0  # elements in the bucket
        self.wide: list[int] = []
        self.waiting: dict[int, Gradient] = {}  # those of the running module, which reduces them at its end

    def _trace(self, turns: Sequence[ModuleTurn]) -> None:
        """Note the order of modules in a micro-batch."""
        self.turns = turns
        self.uses: dict[int, list[int]] = {}  # parameter -> indices of its turns
        self.of_module: dict[tuple[int, str], list[int]] = {}  # module -> indices of its turns
        for at, turn in enumerate(turns):
            for number in turn.parameters:
                self.uses.setdefault(number, []).append(at)
            for name in turn.names:
                self.of_module.setdefault((turn.unit, name), []).append(at)
        sizes = (0 if turn.reduces_at_end else self._elements_of(turn.parameters) for turn in turns)
        self.passed = [0, *accumulate(sizes)]  # elements of modules before each turn
        # Parameters that PEFT's wrappers, which have no name, read before their own modules do: adapters.
        self.external = {number for turn in turns if not (turn.names or turn.reads_head) for number in turn.parameters}
        # The model's turns, if it reads the LM head's weight itself: its forward and its backward.
        self.readers = [at for at, turn in enumerate(turns) if turn.reads_head]

    def omit_backward(self) -> None:
        """Leave the modules of backward out: a parameter is freed after its last use in forward.

        A weight that the model reads outside its module stays. Source: partitioned_param_coordinator.py,
        release_sub_module (is_external_param). All-gathers are on a stream apart from the policy's: each engine makes
        its own (parameter_offload.py).
        """
        self.gather = self.gather and REFERENCE_GATHER
        self._trace([turn for turn in self.turns if not turn.backward])
        self.kept = frozenset(self._read_by_model())

    # -- construction --------------------------------------------------------------------------------------------------

    def wrap(self, weights: Sequence[int]) -> None:
        """Shard the parameters, and create master weights, gradient bucket and gradient buffer.

        Source: stage3.py, __init__, _setup_for_real_optimizer; utils.py, defragment.
        """
        take, drop = self.requests.take, self.requests.drop
        take(1)  # inf_or_nan_tracker
        drop(weights)
        self.requests.empty_cache()
        take(sum(self.shares[number] * self._bytes_of(number) for number in self.trained), 0, Component.WEIGHTS)
        groups, converted = self._sub_groups(), -1
        for elements in groups:
            before, converted = converted, take(elements * FLOAT, 0, Component.MASTER_WEIGHTS)
            drop(() if before < 0 else (before,))
            take(elements * FLOAT, 0, Component.MASTER_WEIGHTS)
        drop((converted,))
        drop((take(max(groups) * FLOAT, 0, Component.GRADIENTS),))
        take(self.choice.zero.reduce_bucket_size * self.dtype_bytes)
        take(sum(groups) * self.summed, 0, Component.GRADIENTS)
        for number in self.trained:  # create_reduce_and_remove_grad_hooks
            drop((take(self._whole_bytes(number)),))

    def updated(self, groups: OptimizerGroups) -> OptimizerGroups:
        """Return the sub-groups of the rank's shards, each as one parameter."""
        return [
            (flat_tensor(elements), options._replace(zero_stage=0, data_parallel=1).without_clipping())
            for _, options in groups
            for elements in self._sub_groups()
        ]

    def _sub_groups(self) -> list[int]:
        """Return the elements of each sub-group. Source: stage3.py, _create_fp16_sub_groups."""
        found: list[int] = []
        for group in self.groups:
            found.append(0)
            for number in group:
                if found[-1] >= SUB_GROUP:
                    found.append(0)
                found[-1] += self.shares[number]
        return found

    def _bytes_of(self, number: int) -> int:
        return DTYPE_BYTES[self.dtypes[number]]

    def _gathered_bytes(self, number: int) -> int:
        """Return the bytes of a gathered parameter; on one rank it is a view of the shard, if that is on the device.

        Source: partition_parameters.py, NoGatherHandle.
        """
        if self.ranks == 1 and not self.choice.host.has_weights:
            return 0
        return self._whole_bytes(number)

    def _whole_bytes(self, number: int) -> int:
        """Return the bytes of an unsharded parameter, padded, as `all_gather` allocates it, also on one rank."""
        return self.shares[number] * self.ranks * self._bytes_of(number)

    # -- gathering -----------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """The order of modules is known, and small parameters are gathered."""
        self.begun = 1
        self.after_step()

    def begin(self, *, have_gradients: bool, last: bool) -> None:
        """Begin a micro-batch, in the recorded order of modules.

        The first one records it, and each one of a model that scores itself (see `begin_scoring`).
        """
        del have_gradients, last
        self._reset(self.turns)
        self.knows_readers = self.begun > 0
        self.in_order = self.knows_readers and not self.scores_itself
        self.begun += 1
        self.positions = {}
        for number in reversed(self.trained):
            self.positions.setdefault(self.ordered[number], deque()).append(number)

    def _reset(self, recorded: Iterable[ModuleTurn]) -> None:
        """Free prefetched parameters, restart the order of modules. Source: reset_step."""
        self._free_arriving()
        self.queue = deque((number, at) for at, turn in enumerate(recorded) for number in turn.parameters)
        self.fetched_for = dict.fromkeys((number for number, _ in self.queue), -1)
        self.turn, self.live, self.running = 0, 0, None

    def _free_arriving(self) -> None:
        """Wait for prefetched parameters, and free them. Source: _clean_inflight_param_registry."""
        for number in [*self.arriving]:
            self._wait(number)
            self._release(number)

    def begin_evaluation(self) -> None:
        """Begin a batch without backward; its modules are in the known order."""
        self.begin(have_gradients=False, last=True)

    def begin_scoring(self) -> None:
        """Begin a forward with adapters disabled, in the order of the policy's forward, which has been recorded.

        The first module of an adapter is missed, and ends this: until the next micro-batch nothing is prefetched.
        Source: partitioned_param_coordinator.py, reset_step, trace_prologue.
        """
        if not self.scores_itself:
            self.begin_evaluation()
            return
        forward = [turn for turn in self.turns if not turn.backward]
        self._trace(self.calls.scoring)
        self._reset(forward)
        self.in_order = self.knows_readers = True
        pairs = enumerate(zip(self.turns, forward, strict=False))
        self.leaves_order = next((at for at, (own, other) in pairs if own[:3] != other[:3]), len(self.turns))

    def after_scoring(self) -> None:
        """Go on with the backward of the policy."""
        if not self.scores_itself:
            return
        self._leave_order()  # at the latest
        self._trace(self.calls.turns)
        self.turn, self.running = next(at for at, turn in enumerate(self.turns) if turn.backward), None

    def _leave_order(self) -> None:
        """Free prefetched parameters, and prefetch no more. Source: _invalidate_trace."""
        self._free_arriving()
        self.in_order, self.leaves_order = False, -1

    def module_of(self, unit: int, name: str) -> str:
        """Return one name of the module, which may have several; "" for a container's parameter."""
        turns = self.of_module.get((unit, name))
        return "" if turns is None else min(self.turns[turns[0]].names)

    def before_module(self, unit: int, module: str, *, again: bool) -> None:
        """Advance to the turn of this module, past the turns of modules without parameters, which programs omit.

        A module without a remaining turn has already had it: its backward began before its recomputation.
        """
        all_of_it = self.of_module[unit, module]
        left = [at for at in all_of_it if at >= self.turn]
        wanted = next((at for at in left if self.turns[at].again == again), None)
        last = wanted if wanted is not None else next(iter(left), self.turn - 1)
        self._advance(last, wanted)
        gone = self.turns[all_of_it[-1]]._replace(backward=True, again=False, releases=True)
        self.running = gone if wanted is None else self.turns[wanted]

    def before_loss(self) -> None:
        """Gather the LM head's weight, if the model reads it outside its module for the first time.

        Then it is registered as a parameter of the model. Source: parameter_offload.py, ZeROOrderedDict.
        """
        for number in self._read_by_model():
            self._gather_now(number)

    def _gather_now(self, number: int) -> None:
        """Gather a missing parameter that another module than its own reads, on the default stream."""
        if number not in self.there and number not in self.arriving:
            self.there[number] = self.requests.take(self._gathered_bytes(number), 0, self.gathered)

    def after_forward(self, unit: int) -> None:
        """Free the LM head's weight that the model has read, unless it is used again soon."""
        if unit == ROOT and self.readers:
            self._leave(self.turns[self.readers[0]])

    def before_backward(self, unit: int) -> None:
        """Gather the LM head's weight for the model's backward."""
        if unit == ROOT and self.readers:
            self._advance(self.readers[-1])

    def _read_by_model(self) -> tuple[int, ...]:
        return self.turns[self.readers[0]].parameters if self.readers else ()

    def _advance(self, last: int, wanted: int | None = None) -> None:
        """Begin the turns up to the last one; end them, except the wanted one and the model's own."""
        while self.turn <= last:
            self._fetch(self.turn)
            self.turn += 1
            before = self.turns[self.turn - 1]
            # Unless the order is known, a wrapper's parameters stay at least until their own module has run.
            stays = before.reads_head or not (self.in_order or before.names)
            if self.turn - 1 != wanted and not stays:
                self._leave(before)

    def after_module(self) -> None:
        """Free the parameters of the running module. Source: release_sub_module."""
        for number in sorted(self.waiting):
            self._put(number, self.waiting.pop(number).storage)
        if self.running is not None:
            self._leave(self.running)
        self.running = None

    def _fetch(self, at: int) -> None:
        """Gather a module's parameters, wait for them, and prefetch the next ones. Source: fetch_sub_module."""
        turn = self.turns[at]
        wanted = turn.parameters
        if at == self.leaves_order:
            self._leave_order()
        if not (self.knows_readers or turn.backward):
            if not turn.names:
                return
            for number in wanted:
                if number in self.external:
                    self._gather_now(number)
        self._gather(wanted)
        for number in wanted:
            self._wait(number)
        if not self.in_order:
            return
        for _ in [number for number in wanted if self.fetched_for[number] < at]:
            number, later = self.queue.popleft()
            self.fetched_for[number] = later
        ahead: list[int] = []
        size, room = 0, min(MOST_LIVE - self.live, self.choice.zero.prefetch_bucket_size)
        while self.queue and size < room:
            number, later = self.queue.popleft()
            if number not in self.there and number not in self.arriving and number not in ahead:
                ahead.append(number)
                size += self.elements[number]
            self.fetched_for[number] = max(self.fetched_for[number], later)
        self._gather(ahead)

    def _gather(self, wanted: Iterable[int]) -> None:
        """All-gather the missing parameters into one buffer a dtype.

        Source: __all_gather_params, all_gather_coalesced, runtime/torch_autocast.py, sort_dtypes (by name).
        """
        missing = sorted(number for number in wanted if number not in self.there and number not in self.arriving)
        if not missing:
            return
        self.live += sum(self.elements[number] for number in missing)
        missing.sort(key=lambda number: self.dtypes[number])
        if self.ranks == 1:  # no all-gather
            self.arriving |= {number: GatherGroup([number], [self._gather_alike([number])]) for number in missing}
            return
        alike = groupby(missing, key=lambda number: self.dtypes[number])
        together = GatherGroup(missing, [self._gather_alike([*members]) for _, members in alike])
        self.arriving.update(dict.fromkeys(missing, together))

    def _gather_alike(self, members: Sequence[int]) -> int:
        """All-gather parameters of one dtype; return the storage of the output."""
        return self.requests.take(sum(map(self._gathered_bytes, members)), self.gather, self.gathered)

    def _wait(self, number: int) -> None:
        """Wait for the all-gather of a parameter, and copy its parameters out of a shared buffer.

        Source: partition_parameters.py, AllGatherHandle.wait, AllGatherCoalescedHandle.wait.
        """
        together = self.arriving.pop(number, None)
        if together is None:
            return
        if len(together.members) == 1:
            self.there[number] = together.buffers[0]
            return
        if not together.copied:
            for each in together.members:
                size = self.elements[each] * self._bytes_of(each)
                self.there[each] = self.requests.take(size, self.gather, self.gathered)
            together.copied = True
        together.waiting.remove(number)
        if not together.waiting:
            self.requests.drop(together.buffers)

    def _leave(self, turn: ModuleTurn) -> None:
        """Free the parameters of a module after its turn, except those that the running model reads, too.

        Source: release_sub_module, __params_to_release.
        """
        shared = self._read_by_model() if self.knows_readers and not turn.reads_head else ()
        for number in (*turn.parameters, *turn.ends) if turn.releases else ():
            if number in shared:
                continue
            if turn.backward and not turn.again and number in self.views:
                self.requests.drop((self.views.pop(number),))
            if turn.again and self.calls.keeps_recomputed and not self.ordered[number].trains:
                self.recomputed[number] = None
            elif number not in self.recomputed and (not self.in_order or self._is_far(number, turn)):
                self._release(number, viewed=self._is_viewed(number, turn))
        if turn.backward and not (turn.again or self.calls.reentrant):
            self._free_recomputed()

    def _free_recomputed(self) -> None:
        """Free the frozen parameters of a recomputation, except small ones; source: update_recompute_parameters."""
        keeps_small = self.in_order or self.calls.reentrant
        for number in self.recomputed:
            if not keeps_small or self.elements[number] > self.choice.zero.param_persistence_threshold:
                self._release(number)
        self.recomputed = {}

    def _is_far(self, number: int, turn: ModuleTurn) -> bool:
        """Return whether a parameter is freed before its next use, once the order of modules is known.

        Source: __params_to_release. The distance counts own parameters of the modules in between, without blocks that
        are hooked whole; for a parameter of such a block, each module counts with all its submodules.
        """
        stays = number in self.kept or self.elements[number] <= self.choice.zero.param_persistence_threshold
        if stays or self.fetched_for[number] > self.turn:
            return False
        if turn.reduces_at_end:
            return self._is_far_from_block(number)
        again = next((later for later in self.uses[number] if later >= self.turn), None)
        return again is None or self.passed[again] - self.passed[self.turn] >= REUSE_DISTANCE

    def _is_far_from_block(self, number: int) -> bool:
        passed = 0
        for turn in self.turns[self.turn :]:
            if passed >= REUSE_DISTANCE:
                return True
            is_model = turn.unit == ROOT and not turn.names
            if is_model or number in turn.inside:
                return False
            passed += self._elements_of(turn.inside)
        return True

    def _elements_of(self, numbers: Iterable[int]) -> int:
        return sum(self.elements[number] for number in numbers)

    def _is_viewed(self, number: int, turn: ModuleTurn) -> bool:
        """Return whether autograd keeps a view of a weight, and so its memory, until the weight's backward.

        That is so for routed experts where their matmuls read views (linear.py handles Linear only), and for trained
        weights that a checkpoint recomputes, unless it is reentrant: it detaches those (torch/utils/checkpoint.py,
        _recomputation_hook).
        """
        detaches = turn.again and not self.calls.reentrant
        saved = self.calls.views_experts and (turn.again if turn.backward else not turn.checkpointed) and not detaches
        return (detaches and self.ordered[number].trains) or (saved and self.ordered[number].routed)

    def _release(self, number: int, *, viewed: bool = False) -> None:
        storage = self.there.pop(number, None)
        if storage is None:
            return
        self.live -= self.elements[number]
        if viewed:
            self.views[number] = storage
        else:
            self.requests.drop((storage,))

    # -- backward ------------------------------------------------------------------------------------------------------

    def gradient_ready(self, gradient: Gradient) -> None:
        """Put a ready gradient into the bucket, reducing a full one first. A larger gradient is not copied.

        Source: stage3.py, reduce_independent_p_g_buckets_and_remove_grads.
        """
        assert gradient.parameter is not None
        if not self.positions[gradient.parameter]:  # a loss in chunks adds to the gradient of its first chunk
            self.requests.drop((gradient.storage,))
            return
        number = self.positions[gradient.parameter].popleft()
        if self.running is not None and self.running.reduces_at_end and number in self.running.parameters:
            self.waiting[number] = gradient
        else:
            self._put(number, gradient.storage)

    def _put(self, number: int, storage: int) -> None:
        if self.inside + self.elements[number] > self.choice.zero.reduce_bucket_size:
            self._reduce()
        fits = self.inside + self.elements[number] <= self.choice.zero.reduce_bucket_size
        self.inside += self.elements[number]
        self.bucket.append(BucketGradient(number, None if fits else storage))
        if fits:
            self.requests.drop((storage,))

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:
        """Reduce the remaining gradients of a micro-batch. Source: independent_gradient_partition_epilogue."""
        for gradient in gradients:
            self.gradient_ready(gradient)
        if unit == ROOT:
            self._reduce()
            if self.calls.frees_leftovers:
                self._free_leftovers()
        elif self.calls.reentrant and not self.scores_itself:  # the layer itself has begun its recomputation
            self._free_recomputed()
        return []

    def _free_leftovers(self) -> None:
        """Free parameters of modules that have not ended in backward, such as the model and the embedding.

        If the model has scored itself, its layers are such modules, for which reentrant checkpoints gather. Source:
        partitioned_param_coordinator.py, release_backward_leftovers.
        """
        turns = (turn for turn in self.turns if turn.backward and (turn.reads_head or not turn.releases))
        for number in (*self.recomputed, *(number for turn in turns for number in turn.parameters)):
            if self.elements[number] > self.choice.zero.param_persistence_threshold:
                self._release(number)
        self.recomputed = {}

    def _reduce(self) -> None:
        """Reduce-scatter the bucket, padded to equal shards.

        Source: stage3.py, __avg_scatter_grads; runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced.
        """
        if not self.bucket:
            return
        numbers = sorted(each.number for each in self.bucket)
        flat: list[int] = []
        if len(numbers) > 1 or self.elements[numbers[0]] % self.ranks:
            padding = [
                self.requests.take(missing * self.dtype_bytes, self.reduce, self.labels.flattened)
                for missing in self._paddings(numbers)
            ]
            size = sum(self.shares[number] for number in numbers) * self.ranks * self.dtype_bytes
            flat = [self.requests.take(size, self.reduce, self.labels.flattened)]
            self.requests.drop(padding)
        cast: list[int] = []
        if self.summed != self.dtype_bytes:
            sizes = (self.shares[number] * self.summed for number in numbers)
            cast = [self.requests.take(size, self.reduce, self.labels.cast) for size in sizes]
            self.requests.drop(flat)
        self._keep(numbers)
        self.requests.drop(cast or flat)
        self.requests.drop(each.storage for each in self.bucket if each.storage is not None)
        self.bucket, self.inside = [], 0

    def _keep(self, numbers: Sequence[int]) -> None:
        """Add the rank's shards of reduced gradients to the buffer, which exists. Source: partition_grads."""

    def _paddings(self, numbers: Sequence[int]) -> Iterator[int]:
        """Yield the elements that each rank's shard of some gradients lacks."""
        for rank in range(self.ranks):
            for number in numbers:
                share = self.shares[number]
                missing = share - max(0, min(share, self.elements[number] - rank * share))
                if missing:
                    yield missing

    # -- the optimizer's step ------------------------------------------------------------------------------------------

    def before_step(self, gradients: list[int]) -> None:
        """Free all gathered parameters, and compute the norm of the rank's gradients.

        Source: stage3.py, step, _partition_all_parameters, get_grad_norm_direct.
        """
        del gradients
        for number in [*self.arriving]:
            self._wait(number)
        for number in [*self.there]:
            self._release(number)
        for group in self.groups:
            norms(self.requests, [self.shares[number] for number in group], self.choice)

    def before_update(self, number: int) -> None:
        """Copy a sub-group's gradients to fp32. Source: _prepare_fp32_grad_for_sub_group."""
        elements = self._sub_groups()[number]
        flat: list[int] = []
        if self.summed < FLOAT:
            flat = [self.requests.take(elements * self.summed, 0, Component.TEMPORARIES)]
        self.wide = [self.requests.take(elements * FLOAT, 0, Component.GRADIENTS)]
        self.requests.drop(flat)

    def after_update(self, number: int) -> None:
        """Free a sub-group's fp32 gradients. Source: _release_sub_group."""
        del number
        self.requests.drop(self.wide)

    def after_step(self) -> None:
        """Gather the small parameters that stay gathered. Source: _post_step."""
        for number, elements in enumerate(self.elements):
            if elements <= self.choice.zero.param_persistence_threshold:
                self.there[number] = self.requests.take(self._gathered_bytes(number), 0, self.gathered)
