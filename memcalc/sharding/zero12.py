"""ZeRO stages 1 and 2 (DeepSpeed 0.19 runtime/zero/stage_1_and_2.py), one rank.

The parameters of each parameter group are flattened into one tensor and become views of it; a rank's partition of it
has an fp32 master copy. Gradients go through one bucket, which is allocated in full: at stage 2 each gradient as soon
as it is ready, at stage 1 all of them after the backward of the last micro-batch. The rank's own gradients are copied
out of the bucket. With overlap_comm there are two buckets, and reductions run on a CUDA stream of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.component import Component
from memcalc.sharding.engine import ROOT, Engine, Gradient, OptimizerGroups
from memcalc.sharding.parameter_groups import parameter_groups
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.spec.zero import DEFAULT as ZERO
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import EngineTensor, NamedRounds, Requests
from memcalc.workspaces import reductions

SOURCE = "DeepSpeed 0.19 runtime/zero/"
ALIGNMENT = 2  # elements; nccl_start_alignment_factor: each partition is a multiple of it
FLOAT, DOUBLE = 4, 8  # bytes
REDUCE = 2  # the CUDA stream of reductions, in addition to the default one

Part = TypeVar("Part")  # of what is reduced in one buffer


class ReductionLabels(NamedTuple):
    """Labels of the storages of gradient reductions."""

    bucket: EngineTensor
    flattened: EngineTensor
    own: EngineTensor
    main: EngineTensor
    whole: EngineTensor
    cast: EngineTensor
    sums: EngineTensor


def reduction_labels(options: StateOptions) -> ReductionLabels:
    """Return the labels of a run's reductions."""
    file = "stage3.py" if options.zero_stage == 3 else "stage_1_and_2.py"
    size = "reduce_bucket_size" if options.zero.reduce_bucket_size != ZERO.reduce_bucket_size else "5e8"

    def label(tensor: str, symbol: str, rule: str, component: Component) -> EngineTensor:
        return EngineTensor(component, tensor, options.compute, symbol, f"{SOURCE}{file}: {rule}")

    communicated, gradients = Component.COMMUNICATION_BUFFERS, Component.GRADIENTS
    return ReductionLabels(
        label("reduce bucket", size, "setup_buckets: allocated whole at the first gradient", communicated),
        label("flattened bucket", "P_bucket", "reduce_independent_p_g_buckets_and_remove_grads", communicated),
        label("gradients of the rank's partition", "P_touched", "copy_grads_in_partition", gradients),
        label("gradients of the rank's partition", "P_touched", "copy_grads_in_partition", gradients)._replace(
            dtype="fp32"
        ),
        label("gradients that are not reduced yet", "P", "process_gradients", gradients),
        label("reduced gradients, cast", "P_bucket/N", "gradient_accumulation_dtype", Component.TEMPORARIES)._replace(
            dtype="fp32"
        ),
        label("sums of the rank's partition", "P/N", "_build_compact_grad_partition_buffer", gradients)._replace(
            dtype="fp32"
        ),
    )


class WaitingGradient(NamedTuple):
    """A parameter with a gradient that waits for reduction.

    Args:
        group: the index of its parameter group.
        begin: its start in the flat tensor of the group.
        elements: its elements.
        storage: the storage of its gradient; None if the gradient was copied into the bucket.
    """

    group: int
    begin: int
    elements: int
    storage: int | None


class BucketSlice(NamedTuple):
    """Consecutive elements of the bucket that one rank keeps.

    Args:
        rank: the rank.
        group: the index of their parameter group.
        elements: their number.
        is_own: whether they are one parameter's, and added to this rank's sums.
    """

    rank: int
    group: int
    elements: int
    is_own: bool = False


class FlatGroup(NamedTuple):
    """The flat tensor of a parameter group.

    Args:
        begins: of each parameter in it, and the end of the last one, in elements.
        padding: elements after the last parameter.
        share: elements of a rank's partition.
        partition: the rank's parameters in it; empty if the rank's partition is padding alone.
    """

    begins: list[int]
    padding: int
    share: int
    partition: range

    @property
    def last(self) -> int:
        """The last rank with parameters: those after it have padding alone."""
        return max(self.begins[-1] - 1, 0) // max(self.share, 1)

    @property
    def of_first_parameter(self) -> int:
        """The last rank with a part of the first parameter, which it keeps whole beside all of its others."""
        return max(self.begins[1] - 1, 0) // max(self.share, 1) if len(self.begins) > 1 else 0

    def of_rank(self, rank: int) -> FlatGroup:
        """Return the same group on a rank."""
        return self._replace(partition=range(rank * self.share, min((rank + 1) * self.share, self.begins[-1])))

    @property
    def touched(self) -> int:
        """Elements of all parameters that overlap the rank's partition."""
        return touched(self.begins, self.partition) if self.partition else 0

    @property
    def places(self) -> list[int]:
        """The places of the parameters that overlap the rank's partition."""
        own, ends = self.partition, enumerate(zip(self.begins, self.begins[1:], strict=False))
        return [at for at, (begin, end) in ends if begin < own.stop and own.start < end]

    @property
    def pieces(self) -> list[int]:
        """Elements of each parameter in the rank's partition."""
        return [self.piece(at) for at in self.places]

    def piece(self, at: int) -> int:
        """Return the elements of the parameter at a place that are in the rank's partition."""
        return min(self.begins[at + 1], self.partition.stop) - max(self.begins[at], self.partition.start)


def flat_group(parameters: Iterable[LocalParameter], ranks: int) -> FlatGroup:
    """Return the flat tensor of a group, on the first rank. Source: flatten_dense_tensors_aligned."""
    begins = [0]
    for parameter in parameters:
        begins.append(begins[-1] + parameter.elements)
    padding = -begins[-1] % (ALIGNMENT * ranks)
    return FlatGroup(begins, padding, (begins[-1] + padding) // ranks, range(0)).of_rank(0)


class ZeRO12(Engine):
    """One rank at ZeRO stage 1 or 2.

    Args:
        requests: where they are recorded.
        ordered: all parameters, in registration order.
        choice: state options of the run.
        rank: which; None: the one that holds most. Its own gradients are allocated whole when the first of them is
            reduced: at stage 2 the last layer's are reduced first, at stage 1 the embedding's.
    """

    hooks_gradients = frees_gradients = True

    def __init__(
        self, requests: Requests, ordered: Sequence[LocalParameter], options: StateOptions, rank: int | None = None
    ) -> None:
        super().__init__(requests)
        self.choice = options
        self.labels = reduction_labels(options)
        self.main = RECIPES[options.recipe].main_gradients_live == "backward"  # an fp32 copy of the rank's gradients
        self.keeps_gradients = options.reduces_after_backward
        self.ordered = ordered
        self.trained = tuple(parameter for parameter in ordered if parameter.trains)
        self.dtype_bytes = DTYPE_BYTES[options.compute]
        members = parameter_groups(self.trained, range(len(self.trained)), options.zero) or [[]]
        self.places = {  # position -> group and place in it
            position: (group, at) for group, each in enumerate(members) for at, position in enumerate(each)
        }
        self.members = members
        groups = [flat_group((self.trained[position] for position in each), options.data_parallel) for each in members]
        last = max(groups, key=lambda group: group.share).last
        if rank is None:
            in_stage_1 = groups[0].of_first_parameter if options.step.pipelined else 0
            rank = in_stage_1 if self.keeps_gradients else last
        self.groups = [group.of_rank(min(rank, last)) for group in groups]
        self.stream = REDUCE if options.has_two_buckets else 0
        self.buckets = 2 if options.has_two_buckets else 1
        self.bucket_size = options.zero.reduce_bucket_size  # elements
        self.have_gradients = False
        self.bucket: list[int] = []  # the storage of the bucket, or of both buckets
        self.waiting: list[WaitingGradient] = []
        self.inside = 0  # elements that wait for reduction
        self.uncopied: list[int] = []  # storages of gradients of other ranks that are larger than a bucket (stage 1)
        self.own: int | None = None  # the gradients of the rank's own partition
        # Module and tensor -> positions of gradients not ready yet.
        self.positions: dict[tuple[str, str], deque[int]] = {}
        self.ready: list[tuple[int, int]] = []  # positions and storages of unreduced gradients (stage 1)
        self.ready_rounds: list[int] = []  # how many equal gradients each of them stands for
        self.order: list[int] = []  # their positions, after the first backward
        self.stepping: list[int] = []  # storages of gradients that the step frees
        self.wide: list[int] = []  # fp32 gradients of the group that is updated

    def wrap(self, weights: Sequence[int]) -> None:
        """Flatten the parameters and create the master weights. Source: __init__, initialize_optimizer_states."""
        take, drop = self.requests.take, self.requests.drop
        for group, clone in self._flatten(weights):
            if self.dtype_bytes < FLOAT:
                take(group.share * FLOAT, 0, Component.MASTER_WEIGHTS)
                drop((clone,))
        # Zero gradients of the master weights, for optimizers that create their states now.
        drop([take(group.share * FLOAT, 0, Component.GRADIENTS) for group in self.groups])

    def _flatten(self, weights: Sequence[int]) -> Iterator[tuple[FlatGroup, int]]:
        """Replace the weights by flat tensors; yield each group with the storage of its partition's clone."""
        take, drop = self.requests.take, self.requests.drop
        for group, members in zip(self.groups, self.members, strict=True):
            self.requests.empty_cache()
            padding = [take(group.padding * self.dtype_bytes)] if group.padding else []
            take((group.begins[-1] + group.padding) * self.dtype_bytes, 0, Component.WEIGHTS)
            drop(padding)
            drop(weights[position] for position in members)
            yield group, take(group.share * self.dtype_bytes, 0, Component.MASTER_WEIGHTS)

    def updated(self, groups: OptimizerGroups) -> OptimizerGroups:
        """Return the rank's partition of each flat tensor, as one parameter."""
        return partitions(groups, self.groups)

    def existing(self) -> list[int]:
        """Record the bucket and all gradients: stage 1 reduces them after the last micro-batch."""
        if not self.keeps_gradients:
            return []
        self.order = self._arriving()
        sizes = [self.bucket_size] * self.buckets + [self.trained[position].elements for position in self.order]
        return [self.requests.take(size * self.dtype_bytes, 0, Component.GRADIENTS) for size in sizes]

    def _arriving(self) -> list[int]:
        """Return the positions of the parameters that get a gradient, in the order of backward."""
        return [position for position in reversed(range(len(self.trained))) if not self.trained[position].unused]

    def _one_by_one(self, storages: Sequence[int]) -> list[int]:
        """Return all gradients of the stage in place of those that stand for the gradients of several layers."""
        for storage, rounds in zip(storages, self.ready_rounds, strict=True):
            with self.requests.repeat(rounds):
                self.requests.drop((storage,))
        self.order = self._arriving()
        sizes = (self.trained[position].elements * self.dtype_bytes for position in self.order)
        return [self.requests.take(size, 0, self.labels.whole) for size in sizes]

    # -- backward ------------------------------------------------------------------------------------------------------

    def begin(self, *, have_gradients: bool, last: bool) -> None:
        """Begin a micro-batch: the last parameter's gradient is ready first."""
        del last
        self.have_gradients = have_gradients
        self.positions = {}
        for position in reversed(range(len(self.trained))):
            held = self.trained[position]
            self.positions.setdefault((held.module, held.tensor), deque()).append(position)

    def gradient_ready(self, gradient: Gradient) -> None:
        """Put a ready gradient into the bucket (stage 2), or keep it (stage 1). Source: process_gradients."""
        assert gradient.parameter is not None
        if self.keeps_gradients and self.have_gradients:  # added to the gradient of earlier micro-batches
            self.requests.drop((gradient.storage,))
            return
        if not self.bucket:
            size = self.bucket_size * self.dtype_bytes
            self.bucket = [self.requests.take(size, 0, self.labels.bucket) for _ in range(self.buckets)]
        positions = self.positions[gradient.parameter.module, gradient.parameter.tensor]
        if not positions:  # a loss in chunks adds to the gradient of its first chunk
            self.requests.drop((gradient.storage,))
            return
        position = positions.popleft()
        if self.keeps_gradients:
            self.ready.append((position, gradient.storage))
            self.ready_rounds.append(self.requests.rounds)
            if self.main and not self.have_gradients:
                self.requests.take(self.trained[position].elements * FLOAT, 0, self.labels.main)
        else:
            self._into_bucket(position, gradient.storage)

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:
        """Reduce the remaining gradients of a micro-batch at stage 2; return the gradients that stay.

        Source: overlapping_partition_gradients_reduce_epilogue.
        """
        for gradient in gradients:
            self.gradient_ready(gradient)
        if unit != ROOT:
            return []
        if self.keeps_gradients:
            return self._whole()
        self._reduce()
        own = self._own_gradients()
        self._drop_bucket()
        if not self.have_gradients:
            return own
        self.requests.drop(own)  # already added to the gradient of earlier micro-batches
        return []

    def after_last_backward(self, gradients: list[int]) -> list[int]:
        """Reduce the gradients of all micro-batches at stage 1; return the rank's own. Source: reduce_gradients."""
        if not self.keeps_gradients:
            return gradients
        self.bucket, storages = gradients[: self.buckets], gradients[self.buckets :]
        if self.choice.step.pipelined:  # another bucket, beside that of backward
            self.bucket.append(self.requests.take(self.bucket_size * self.dtype_bytes, 0, self.labels.bucket))
        if any(isinstance(rounds, NamedRounds) for rounds in self.ready_rounds):
            storages = self._one_by_one(storages)
        self.ready_rounds = []
        for position, storage in sorted(
            zip(self.order, storages, strict=True), key=lambda gradient: self.places[gradient[0]]
        ):
            self._into_bucket(position, storage)
        self._reduce()
        own = [*self._own_gradients(), *self._unused_gradients()]
        self._drop_bucket()
        return own

    def _unused_gradients(self) -> list[int]:
        """Allocate zeros for parameters of the rank's partition without a gradient. Source: get_all_grad_tensors."""
        groups = zip(self.groups, self.members, strict=True)
        own = (self.trained[members[at]] for group, members in groups for at in group.places)
        sizes = (parameter.elements * self.dtype_bytes for parameter in own if parameter.unused)
        return [self.requests.take(size, 0, self.labels.own) for size in sizes]

    def _own_gradients(self) -> list[int]:
        """Return the gradients of the rank's partition, which stay until the step."""
        own, self.own = self.own, None
        assert own is not None
        return [own]

    def _whole(self) -> list[int]:
        """Return the bucket and the gradients that a step's first micro-batch has produced."""
        if not self.bucket:
            return []
        self.order = [position for position, _ in self.ready]
        kept = [*self.bucket, *(storage for _, storage in self.ready)]
        self.bucket, self.ready = [], []
        return kept

    def _into_bucket(self, position: int, storage: int) -> None:
        """Put a gradient into the bucket, reducing a full one first. A gradient larger than the bucket is not copied.

        Source: reduce_independent_p_g_buckets_and_remove_grads.
        """
        group, at = self.places[position]
        begin, elements = self.groups[group].begins[at], self.trained[position].elements
        if self.inside + elements > self.bucket_size:
            self._reduce()
        self.inside += elements
        if elements > self.bucket_size:
            self.waiting.append(WaitingGradient(group, begin, elements, storage))
            return
        self.waiting.append(WaitingGradient(group, begin, elements, None))
        self.requests.drop((storage,))

    def _reduce(self) -> None:
        """Reduce the bucket and copy the rank's own gradients of all groups out of it.

        Source: reduce_ipg_grads, average_tensor, allreduce_and_scatter, copy_grads_in_partition.
        """
        for together in self._together(bucket_slices(self.waiting, self.groups)):
            self.requests.drop(self._flattened(together))
        self._keep_own()

    def _together(self, slices: Iterable[BucketSlice]) -> Iterator[list[BucketSlice]]:
        return reduced_together(slices, self.bucket_size, lambda each: each.elements)

    def _flattened(self, together: Sequence[BucketSlice]) -> list[int]:
        """Return the storage of the slices that are reduced in one buffer; none: flattening one copies nothing."""
        if len(together) == 1:
            return []
        size = sum(each.elements for each in together) * self.dtype_bytes
        return [self.requests.take(size, self.stream, self.labels.flattened)]

    def _keep_own(self) -> None:
        """Keep the rank's own gradients, and empty the bucket.

        At stage 1 the gradient of a parameter outside of the partition stays if it was not copied into the bucket.
        Source: reduce_ipg_grads.
        """
        for each in self.waiting:
            own = self.groups[each.group].partition
            is_own = each.begin < own.stop and own.start < each.begin + each.elements
            if is_own:
                self._keep(each)
            uncopied = [] if each.storage is None else [each.storage]
            if self.choice.zero_stage == 1 and not is_own:
                self.uncopied += uncopied
            else:
                self.requests.drop(uncopied)
        self.waiting, self.inside = [], 0

    def _keep(self, gradient: WaitingGradient) -> None:
        """Copy a reduced gradient of the rank's partition out of the bucket. Source: copy_grads_in_partition."""
        del gradient
        if self.own is not None:
            return
        size = sum(group.touched for group in self.groups)
        self.own = self.requests.take(size * self.dtype_bytes, self.stream, self.labels.own)
        if self.main and not (self.have_gradients or self.keeps_gradients):
            self.requests.take(size * FLOAT, 0, self.labels.main)

    def _drop_bucket(self) -> None:
        """Free the buckets and other gradients. Source: independent_gradient_partition_epilogue."""
        assert self.bucket
        self.requests.drop([*self.bucket, *self.uncopied])
        self.bucket, self.uncopied = [], []

    # -- the optimizer's step ------------------------------------------------------------------------------------------

    def before_step(self, gradients: list[int]) -> None:
        """Compute the norm of the rank's gradients. Source: step, scaled_global_norm."""
        for group, members in zip(self.groups, self.members, strict=True):
            counted = [group.piece(at) for at in group.places if not self.trained[members[at]].replica]
            norms(self.requests, counted, self.choice)
        self.stepping = gradients

    def before_update(self, number: int) -> None:
        """Allocate the flattened gradients of a group, then their fp32 copy; the last group frees the gradients.

        Flattening does not copy a single tensor, and a cast no fp32 one.
        """
        take, group = self.requests.take, self.groups[number]
        flat = [take(group.share * self.dtype_bytes, 0, Component.TEMPORARIES)] if len(group.pieces) > 1 else []
        done = self.stepping if number == len(self.groups) - 1 else []
        if self.dtype_bytes == FLOAT:
            self.wide = flat or done
            self.requests.drop(done if flat else ())
            return
        self.wide = [take(group.share * FLOAT, 0, Component.GRADIENTS)]
        self.requests.drop((*flat, *done))

    def after_update(self, number: int) -> None:
        """Free the fp32 gradient of a group."""
        del number
        self.requests.drop(self.wide)


def norms(requests: Requests, pieces: Iterable[int], options: StateOptions) -> None:
    """Record the norm of each gradient piece, in double precision, and the total norm.

    Args:
        requests: where they are recorded.
        pieces: the elements of each piece.
        options: state options of the run.
    """
    found: list[int] = []
    for elements in pieces:
        wide = requests.take(elements * DOUBLE, 0, Component.TEMPORARIES)
        found.append(requests.take(DOUBLE, 0, Component.TEMPORARIES))
        requests.drop((requests.play(reductions.norm(elements, options.card, DOUBLE), Component.TEMPORARIES), wide))
    requests.drop((requests.take(len(found) * DOUBLE, 0, Component.TEMPORARIES), *found))


def touched(begins: Sequence[int], partition: range) -> int:
    """Return the elements of all parameters that overlap a rank's partition.

    Args:
        begins: of each parameter in the flat tensor, and the end of the last one.
        partition: the rank's part of the flat tensor.
    """
    stop = next(end for end in begins if end >= partition.stop)
    start = max((begin for begin in begins if begin <= partition.start), default=0)
    return stop - start


def flat_tensor(elements: int) -> LocalParameters:
    """Return one flat tensor as the only parameter of an optimizer."""
    return LocalParameters([LocalParameter("partition", "flat", (("P/N", elements),), 1, "head")])


def partitions(groups: OptimizerGroups, flat: Sequence[FlatGroup]) -> list[tuple[LocalParameters, StateOptions]]:
    """Return a rank's partition of each flat tensor, as the optimizer's only parameter, with its options.

    Args:
        groups: the trained parameters by dtype, with their options.
        flat: the flat tensors.
    """
    return [
        (flat_tensor(group.share), options._replace(zero_stage=0, data_parallel=1).without_clipping())
        for _, options in groups
        for group in flat
    ]


def bucket_slices(
    waiting: Sequence[WaitingGradient], groups: Sequence[FlatGroup], *, own_apart: bool = False
) -> list[BucketSlice]:
    """Return the slices of the bucket by the rank that keeps them; consecutive ones of a rank are merged.

    Args:
        waiting: the gradients in the bucket.
        groups: the flat tensors.
        own_apart: whether those of this rank are not merged.
    """
    slices: list[BucketSlice] = []  # hundreds of thousands if many ranks share a bucket
    for each in waiting:
        group, begin, end = groups[each.group], each.begin, each.begin + each.elements
        while begin < end:
            rank = begin // group.share
            stop, elements = min(end, (rank + 1) * group.share), 0
            is_own = own_apart and begin in group.partition
            if slices and slices[-1].rank == rank and not is_own:
                elements = slices.pop().elements
            slices.append(BucketSlice(rank, each.group, elements + stop - begin, is_own))
            begin = stop
    return slices


def reduced_together(parts: Iterable[Part], most: int, elements: Callable[[Part], int]) -> Iterator[list[Part]]:
    """Yield the parts that are flattened into one buffer: it ends once it has more than `most` elements.

    Source: allreduce_and_scatter of slices; runtime/engine.py, allreduce_no_retain of gradients.
    """
    together: list[Part] = []
    inside = 0
    for each in parts:
        together.append(each)
        inside += elements(each)
        if inside > most:
            yield together
            together, inside = [], 0
    if together:
        yield together
