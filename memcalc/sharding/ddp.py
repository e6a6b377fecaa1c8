"""DistributedDataParallel with its defaults (torch 2.13 nn/parallel/distributed.py, csrc/distributed/c10d/reducer.cpp).

The constructor broadcasts rank 0's parameters in flat buffers of 250 MiB, then allocates one bucket for all gradients.
The forward after the first reduction replaces it by buckets of 25 MiB in the order in which gradients became ready.
With find_unused_parameters there are buckets of 25 MiB from the start, the last parameters first, which stay.
Gradients are copied into buckets and stay allocated in addition (gradient_as_bucket_view=False).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.sharding.engine import ROOT, Engine, Gradient
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import EngineTensor, Requests

MIB = 2**20
BROADCAST_BYTES = 250 * MIB  # distributed.py, broadcast_bucket_size
FLAT_BUFFERS_AT_ONCE = 2  # csrc/distributed/c10d/comm.cpp, broadcast_coalesced: maxInFlight
FIRST_BUCKET_BYTES = MIB  # distributed_c10d, _DEFAULT_FIRST_BUCKET_BYTES
BUCKET_BYTES = 25 * MIB  # bucket_cap_mb
FLAG_BYTES = 4  # of a parameter: whether it was used


def reduces_again(options: StateOptions) -> bool:
    """Return whether DDP makes reduced gradients that the recipe has already summed and freed."""
    return options.engine == "ddp" and options.data_parallel > 1 and RECIPES[options.recipe].gradients is None


@cache
def _reduced(dtype: str) -> EngineTensor:
    """Return the label of such gradients; source: `grad = clone_obey_contract(bucket_view, variable)`."""
    source = "torch/csrc/distributed/c10d/reducer.cpp: finalize_bucket_dense"
    return EngineTensor(Component.GRADIENTS, "reduced gradients, made again", dtype, "P", source)


class DDP(Engine):
    """One rank of DistributedDataParallel.

    Args:
        requests: the list of requests to record to.
        parameters: all parameters, in registration order.
        choice: state options of the run.
        reduces_each: whether each micro-batch reduces its gradients; if not, all but the last run under no_sync.
        stream: the CUDA stream of the constructor, on which autograd then adds the gradients of a tied weight, because
            it makes the nodes that accumulate gradients. If it is not the default one, as in Lightning (2.6
            pytorch/strategies/ddp.py, _setup_model), the cache is emptied afterwards (checkpoint_connector.py,
            resume_end).
        finds_unused: DDP's find_unused_parameters.
        bucket_cap_mb: DDP's argument of this name; None: its default.
    """

    def __init__(
        self,
        requests: Requests,
        parameters: Sequence[LocalParameter],
        options: StateOptions,
        *,
        reduces_each: bool,
        stream: int,
        finds_unused: bool = False,
        bucket_cap_mb: int | None = None,
    ) -> None:
        super().__init__(requests)
        # Bytes of a bucket: of the first one, of the others (distributed.py, BucketCapacityConfig).
        self.limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES] if bucket_cap_mb is None else [bucket_cap_mb * MIB]
        self.parameters = parameters
        self.choice = options
        self.reduces_each = reduces_each
        self.sum_stream = stream
        self.finds_unused = finds_unused
        self.buckets: list[int] = []
        self.ready: list[LocalParameter] = []  # parameters in the order in which their gradients are ready
        self.is_ordered = False  # whether `ready` is complete
        self.reduces = False  # whether this micro-batch does
        self.has_reduced = False  # whether it or an earlier one does
        self.rebuilt = False

    def wrap(self, weights: Sequence[int]) -> None:
        """Broadcast the parameters and allocate the first buckets."""
        del weights
        in_flight: deque[int] = deque()
        for sizes in in_order_of_first(self._sized(self.parameters), [BROADCAST_BYTES]):
            flat = sum(sizes) if len(sizes) > 1 else 0  # csrc/utils/tensor_flatten.h: a single tensor is not copied
            in_flight.append(self.requests.take(flat, self.sum_stream))
            if len(in_flight) == FLAT_BUFFERS_AT_ONCE:
                self.requests.drop((in_flight.popleft(),))
        self.requests.drop(in_flight)
        trained = self._trained
        if self.finds_unused:  # distributed.py, _ddp_init_helper
            buckets = [*reversed(in_order_of_first(self._sized(trained), self.limits))]
        else:
            buckets = in_order_of_first(self._sized(reversed(trained)), [])
        self.buckets = [self.requests.take(sum(sizes), self.sum_stream) for sizes in buckets]
        if self.finds_unused:
            self.requests.take(FLAG_BYTES * len(trained), self.sum_stream)  # local_used_map_dev_
        if self.sum_stream:
            self.requests.empty_cache()

    def begin(self, *, have_gradients: bool, last: bool) -> None:
        """Note whether this micro-batch reduces. Source: reducer.cpp, autograd_hook (expect_autograd_hooks_)."""
        del have_gradients
        self.reduces = self.reduces_each or last
        self.has_reduced = self.has_reduced or self.reduces

    def prepare(self) -> None:
        """Rebuild the buckets before the first forward after a reduction."""
        if self.finds_unused or self.rebuilt or not (self.has_reduced and self.is_ordered):
            return
        self.rebuilt = True
        self.requests.drop(self.buckets)
        buckets = grouped(self._sized(self.ready), self.limits)
        self.buckets = [self.requests.take(sum(bucket.sizes)) for bucket in buckets]

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:
        """Record the order in which gradients become ready."""
        if not self.is_ordered:
            parameters = _as_accumulated(each.parameter for each in gradients if each.parameter is not None)
            if unit == ROOT:
                first = [parameter for parameter in parameters if parameter.where != "embedding"]
                last = [parameter for parameter in parameters if parameter.where == "embedding"]
                last.sort(
                    key=lambda parameter: parameter.module == "embed_tokens"
                )  # token embeddings are looked up first
                self.ready = [*first, *self.ready, *last] or [*reversed(self._trained)]  # none: hooks have freed them
                self.is_ordered = True
            else:
                self.ready += parameters
        kept = super().after_backward(unit, gradients)
        if unit == ROOT and self.reduces and reduces_again(self.choice):
            self._finalize()
        return kept

    @property
    def _trained(self) -> list[LocalParameter]:
        return [parameter for parameter in self.parameters if parameter.trains]

    def _finalize(self) -> None:
        """Allocate reduced gradients, although the recipe has summed and freed those that were reduced; free them."""
        made = [self.requests.take(size, 0, _reduced(dtype)) for dtype, size in self._sized(self.ready)]
        self.requests.drop(made)

    def _sized(self, parameters: Iterable[LocalParameter]) -> Iterable[tuple[str, int]]:
        for parameter in parameters:
            if parameter.beside:  # scales of a 4-bit weight are attributes, not parameters, so DDP ignores them
                continue
            dtype = parameter.dtype or self.choice.base
            yield dtype, DTYPE_BYTES[dtype] * parameter.elements


def _as_accumulated(produced: Iterable[LocalParameter]) -> list[LocalParameter]:
    """Return the parameters in the order in which their gradients are accumulated.

    addmm produces the gradients of weight and bias; the weight's gradient still has to be transposed.
    """
    found: list[LocalParameter] = []
    for parameter in produced:
        after_its_weight = found and parameter.tensor == "bias" and found[-1].module == parameter.module
        if after_its_weight and len(found[-1].axes) > 1:
            found.insert(-1, parameter)
        else:
            found.append(parameter)
    return found


class Bucket(NamedTuple):
    """Tensors of one dtype: the index of the first one, and the bytes of each."""

    first: int
    sizes: list[int]


def in_order_of_first(sizes: Iterable[tuple[str, int]], limits: Sequence[int]) -> list[list[int]]:
    """Return the bytes of each tensor per bucket, buckets sorted by their first tensor, before any gradient is ready.

    Source: reducer.cpp, compute_bucket_assignment_by_size, without tensor_indices.
    """
    return [bucket.sizes for bucket in sorted(grouped(sizes, limits))]


def grouped(sizes: Iterable[tuple[str, int]], limits: Sequence[int]) -> list[Bucket]:
    """Return the buckets in the order in which they are complete. Source: reducer.cpp, as above.

    A bucket of a dtype is complete when it has reached its limit.

    Args:
        sizes: dtype and bytes of each tensor, in order.
        limits: bytes of the first, second ... bucket of each dtype; the last limit applies to all later ones. Empty for
            no limit.
    """
    done: list[Bucket] = []
    filling: dict[str, Bucket] = {}
    complete: dict[str, int] = {}  # how many, by dtype
    for index, (dtype, size) in enumerate(sizes):
        filling.setdefault(dtype, Bucket(index, [])).sizes.append(size)
        if limits and sum(filling[dtype].sizes) >= limits[min(complete.get(dtype, 0), len(limits) - 1)]:
            complete[dtype] = complete.get(dtype, 0) + 1
            done.append(filling.pop(dtype))
    return [*done, *filling.values()]
