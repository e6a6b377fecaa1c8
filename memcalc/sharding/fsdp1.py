"""FSDP1: FullyShardedDataParallel around each layer and the root (torch 2.13 distributed/fsdp/_runtime_utils.py).

The parameters of a unit are one flat parameter, of which each rank has a chunk (_flat_param.py). The chunk is cast on
the pre-unshard stream and gathered into the unsharded flat parameter on the unshard stream. Modules read views of it.
It is freed after forward, except the root's and at stage 2, and after the unit's backward. Autograd concatenates the
gradients of the views, when the last one exists, into a flat gradient on the unshard stream, where forward made the
views. The post-backward stream casts, pads and reduces it. Blocks that another stream uses are freed once its work is
done; here, and on the null CUDA device, at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.component import Component
from memcalc.sharding.engine import ROOT, Engine, Gradient
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.flat_states import flat_states, unit_of
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import EngineTensor, Requests

# CUDA streams in addition to the default one (_init_streams); the all-reduce stream exists only under HSDP.
UNSHARD, POST_BACKWARD, PRE_UNSHARD, ALL_REDUCE = 1, 2, 3, 4
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


class FSDP1(Engine):
    """One rank of FSDP1. Stage 3 is FULL_SHARD or HYBRID_SHARD, stage 2 SHARD_GRAD_OP.

    Args:
        requests: the list of requests to record to.
        units: the parameters of each unit, in registration order.
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
        self.output_is_loss = options.loss_in_model
        # Only the last micro-batch reduces, and the first one cannot prefetch.
        self.repeats = not (options.sums_unsharded or options.forward_prefetch)
        known: dict[tuple[LocalParameter, ...], FlatUnitSizes] = {}
        pieces: dict[tuple[LocalParameter, ...], tuple[int, ...]] = {}
        self.sizes: dict[int, FlatUnitSizes] = {}
        self.pieces: dict[int, tuple[int, ...]] = {}  # bytes of the rank's part of each parameter
        self.trains: dict[int, bool] = {}
        self.labels: dict[int, FlatUnitLabels] = {}
        for unit, parameters in units.items():
            members = tuple(each for each in parameters if not each.beside)
            if not members:
                continue
            if members not in known:
                known[members] = sizes_of(members, options)
                pieces[members] = pieces_of(members, options, rank)
            self.sizes[unit], self.labels[unit] = known[members], labels_of(unit, members, options)
            self.pieces[unit] = pieces[members]
            self.trains[unit] = any(each.trains for each in members)
        layers = sorted(unit for unit in self.sizes if unit >= 0)
        self.before = dict(zip([*layers[1:], ROOT], layers, strict=False))  # unit -> the unit that ran before it
        self.after = dict(zip((ROOT, *layers), layers, strict=False))  # unit -> the unit that runs after it
        self.unsharded: dict[int, int] = {}  # unit -> the gathered flat parameter
        self.sums: dict[int, int] = {}  # unit -> flat gradient of earlier micro-batches, not reduced
        self.have_gradients = False
        self.reduces = True
        self.is_initialized = False
        self.knows_order = False  # whether a batch has recorded the order of units (_exec_order_utils.py)
        self.is_any = False  # whether the micro-batch stands for any of the step

    def updated(
        self, groups: Sequence[tuple[LocalParameters, StateOptions]]
    ) -> Sequence[tuple[LocalParameters, StateOptions]]:
        """Return flat parameters, or with use_orig_params the rank's part of each parameter."""
        return [flat_states(parameters, options, self.rank)[1:] for parameters, options in groups]

    def existing(self) -> list[int]:
        """Record the flat gradients of earlier micro-batches, which the last one reduces."""
        for unit, sizes in self.sizes.items() if self.choice.sums_unsharded else ():
            if self.trains[unit]:
                with self.requests.repeat(self.rounds.get(unit, 1)):
                    self.sums[unit] = self.requests.take(sizes.gradient, UNSHARD, self.labels[unit].gradient)
        return []

    def resume(self) -> None:
        """Skip the initialization, which precedes the first step.

        The micro-batch stands for any of the step: sums are live until the root's backward, as in a micro-batch that
        does not reduce, and gradients are reduced, as in the last one. At stage 2 a micro-batch that does not reduce
        leaves all units unsharded.
        """
        self.is_initialized = self.is_any = self.knows_order = True
        if self.choice.sums_unsharded and not self.reshards:
            for unit in self.sizes:
                with self.requests.repeat(self.rounds.get(unit, 1)):
                    self._unshard(unit)

    def prepare(self) -> None:
        """Initialize all units before the first forward: allocate each buffer once, and free it.

        Source: _flat_param.py, init_flat_param_attributes.
        """
        if self.is_initialized:
            return
        self.is_initialized = True
        for unit in (ROOT, *(unit for unit in self.sizes if unit != ROOT)):
            if unit not in self.sizes:
                continue
            sizes, labels = self.sizes[unit], self.labels[unit]
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
        self.reduces = last or not self.choice.sums_unsharded

    def before_forward(self, unit: int) -> None:
        """Pre-forward: unshard, unless an earlier pass has left the unit unsharded; prefetch the next unit."""
        self._unshard(unit)
        if self.choice.forward_prefetch and self.knows_order:
            self._unshard(self.after.get(unit))

    def after_forward(self, unit: int) -> None:
        """Post-forward: free the unsharded flat parameter, except the root's. Source: _post_forward_reshard."""
        if unit != ROOT and self.reshards and unit in self.unsharded:
            self.requests.drop((self.unsharded.pop(unit),))

    def after_evaluation(self) -> None:
        """Free the flat parameters that stay unsharded after forward, such as the root's.

        In PyTorch they stay until the next training step; they are freed here, since its forward gathers them.
        """
        self._drop_all(self.unsharded)

    def before_backward(self, unit: int) -> None:
        """Pre-backward: unshard unless prefetched; prefetch the unit that ran before. Source: _pre_backward_hook."""
        self._unshard(unit)
        if self.choice.backward_prefetch == "pre":
            self._unshard(self.before.get(unit))

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:
        """Post-backward: concatenate gradients, reshard, prefetch, reduce. Source: _post_backward_hook."""
        self.knows_order |= unit == ROOT
        flat: list[int] = []
        if gradients and unit in self.sizes:  # ATen FunctionsManual.cpp, split_with_sizes_backward
            sizes, label, take = self.sizes[unit], self.labels[unit].gradient, self.requests.take
            zeros = [take(size, UNSHARD, label) for size in sizes.zeros]
            flat = [take(sizes.gradient, UNSHARD, label)]
            self.requests.drop(zeros)
        self.requests.drop(each.storage for each in gradients)
        if unit in self.unsharded and self._frees_in_backward(unit):
            self.requests.drop((self.unsharded.pop(unit),))
        if self.choice.backward_prefetch == "post" and unit != ROOT:  # the layers have run backward before the root
            self._unshard(self.before.get(unit))
        if not flat:
            return []
        if not self.reduces:
            self._add_up(unit, flat)
            return []
        if self.is_any and unit == ROOT:
            self._drop_all(self.sums, but=ROOT)
            self._drop_all(self.unsharded)
        if unit in self.sums and not (self.is_any and unit != ROOT):
            flat.insert(0, self.sums.pop(unit))
        kept = self._reduce(unit)
        self.requests.drop(flat)
        return kept

    def _frees_in_backward(self, unit: int) -> bool:
        """Return whether a unit is resharded after its backward. Source: _should_free_in_backward."""
        if self.is_any and self.choice.sums_unsharded and unit != ROOT:
            return self.reshards
        return self.reduces or self.reshards

    def _drop_all(self, storages: dict[int, int], but: int | None = None) -> None:
        """Free a storage of each unit."""
        for unit in [each for each in storages if each != but]:
            with self.requests.repeat(self.rounds.get(unit, 1)):
                self.requests.drop((storages.pop(unit),))

    def _add_up(self, unit: int, flat: list[int]) -> None:
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

    def _unshard(self, unit: int | None) -> None:
        """Cast and gather a unit. Source: _runtime_utils.py, _unshard; _flat_param.py, pre_unshard to post_unshard."""
        if unit is None or unit not in self.sizes or unit in self.unsharded:
            return
        sizes, labels, take = self.sizes[unit], self.labels[unit], self.requests.take
        cast = [take(sizes.cast, PRE_UNSHARD, labels.cast)] if sizes.cast else []
        self.unsharded[unit] = take(sizes.unsharded, UNSHARD, labels.unsharded)
        self.requests.drop(cast)

    def _reduce(self, unit: int) -> list[int]:
        """Reduce-scatter a unit's flat gradient; return the shard, unless it is added to an earlier one.

        Source: _runtime_utils.py, _reduce_grad, _get_reduce_scatter_tensors, _accumulate_sharded_grad.
        """
        sizes, labels, take = self.sizes[unit], self.labels[unit], self.requests.take
        used = [take(size, POST_BACKWARD, labels.narrowed) for size in (sizes.narrowed, sizes.padded) if size]
        shard = take(sizes.reduced, POST_BACKWARD, labels.shard)
        if sizes.shard:  # _cast_grad_to_param_dtype
            stream = ALL_REDUCE if self.choice.replicates else POST_BACKWARD
            reduced, shard = shard, take(sizes.shard, stream, labels.shard)
            self.requests.drop((reduced,))
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
    compute = options.gathered or own
    reduced = options.reduced or own
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
    if not options.use_orig_params:
        return ()
    size = DTYPE_BYTES[parameters[0].dtype or options.base]
    return tuple(size * elements for elements in unit_of(parameters, options).pieces(rank) if elements)


def labels_of(unit: int, parameters: tuple[LocalParameter, ...], options: StateOptions) -> FlatUnitLabels:
    """Return the labels of a unit's storages."""
    name, symbol = ("the root", "P_root") if unit == ROOT else ("a layer", "P_layer")
    own = parameters[0].dtype or options.base
    compute, reduced = options.gathered or own, options.reduced or own

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
