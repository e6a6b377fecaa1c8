"""DistributedDataParallel with its defaults (torch 2.13 nn/parallel/distributed.py, csrc/distributed/c10d/reducer.cpp).

Wrapping broadcasts rank 0's parameters in flat buffers of 250 MiB, then allocates one bucket for all gradients. The
second forward replaces it by buckets of 25 MiB in the order in which gradients became ready. Gradients are copied into
buckets, and stay beside them (gradient_as_bucket_view=False).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from memcalc.estimation.choice import Choice
from memcalc.estimation.sharding import Held
from memcalc.rehearsal.requests import Requests
from memcalc.sharding.engine import ROOT, Engine, Gradient
from memcalc.spec.recipes import DTYPE_BYTES

MIB = 2**20
BROADCAST_BYTES = 250 * MIB  # distributed.py, broadcast_bucket_size
FLAT_BUFFERS_AT_ONCE = 2  # csrc/distributed/c10d/comm.cpp, broadcast_coalesced: maxInFlight
FIRST_BUCKET_BYTES = MIB  # distributed_c10d, _DEFAULT_FIRST_BUCKET_BYTES
BUCKET_BYTES = 25 * MIB  # bucket_cap_mb


class DDP(Engine):
    """One rank of DistributedDataParallel.

    Args:
        requests: where they are written.
        parameters: all, in registration order.
        choice: of the run.
    """

    def __init__(self, requests: Requests, parameters: Sequence[Held], choice: Choice) -> None:
        super().__init__(requests)
        self.parameters = parameters
        self.choice = choice
        self.buckets: list[int] = []
        self.ready: list[Held] = []  # parameters in the order in which their gradients are ready
        self.rebuilt = False

    def wrap(self, weights: Sequence[int]) -> None:
        """Broadcast the parameters and allocate the first buckets."""
        del weights
        in_flight: deque[int] = deque()
        for size in grouped(self._sized(self.parameters), [BROADCAST_BYTES]):
            in_flight.append(self.requests.take(size))
            if len(in_flight) == FLAT_BUFFERS_AT_ONCE:
                self.requests.drop((in_flight.popleft(),))
        self.requests.drop(in_flight)
        trained = [held for held in reversed(self.parameters) if held.trains]
        self.buckets = [self.requests.take(size) for size in grouped(self._sized(trained), [])]

    def prepare(self) -> None:
        """Rebuild the buckets before the second forward."""
        if self.rebuilt or not self.ready:
            return
        self.rebuilt = True
        self.requests.drop(self.buckets)
        sizes = grouped(self._sized(self.ready), [FIRST_BUCKET_BYTES, BUCKET_BYTES])
        self.buckets = [self.requests.take(size) for size in sizes]

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:
        """Note the order of gradients."""
        if not self.rebuilt:
            parameters = [each.parameter for each in gradients if each.parameter is not None]
            if unit == ROOT:
                first = [held for held in parameters if held.where != "embedding"]
                last = [held for held in parameters if held.where == "embedding"]
                self.ready = [*first, *self.ready, *last]
            else:
                self.ready += parameters
        return super().after_backward(unit, gradients)

    def _sized(self, parameters: Iterable[Held]) -> Iterable[tuple[str, int]]:
        for held in parameters:
            dtype = held.dtype or self.choice.base
            yield dtype, DTYPE_BYTES[dtype] * held.elements


def grouped(sizes: Iterable[tuple[str, int]], limits: Sequence[int]) -> list[int]:
    """Return the bytes of each bucket, in order. Source: reducer.cpp, compute_bucket_assignment_by_size.

    A bucket of a dtype is complete when it has reached its limit.

    Args:
        sizes: dtype and bytes of each tensor, in order.
        limits: bytes of the first, second ... bucket of each dtype, the last one for all that follow; none: no limit.
    """
    done: list[int] = []
    filling: dict[str, int] = {}
    complete: dict[str, int] = {}  # how many, by dtype
    for dtype, size in sizes:
        filling[dtype] = filling.get(dtype, 0) + size
        if limits and filling[dtype] >= limits[min(complete.get(dtype, 0), len(limits) - 1)]:
            complete[dtype] = complete.get(dtype, 0) + 1
            done.append(filling.pop(dtype))
    return [*done, *filling.values()]
