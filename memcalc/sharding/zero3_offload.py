"""ZeRO stage 3 with optimizer states, or also weights, in host memory (DeepSpeed 0.19 runtime/zero/), one rank.

Master weights, gradients and optimizer states are in host memory, where the step runs. A rank's shards of reduced
gradients are copied back to the device to be added, and after the last micro-batch of a step to compute their norms
and to cast them to fp32. A rank's shards of weights in host memory are copied to the device to be gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.sharding.engine import OptimizerGroups
from memcalc.sharding.zero3 import HookedModules, ZeRO3
from memcalc.sharding.zero12 import DOUBLE, FLOAT, SOURCE
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import EngineTensor, Requests
from memcalc.workspaces import reductions

NORM_ELEMENTS = 250_000_000  # elements of which a norm is computed at once: stage3.py, _constant_buffered_norm2
FILE = f"{SOURCE}stage3.py"


class ZeRO3Offload(ZeRO3):
    """One rank at ZeRO stage 3 with offloaded optimizer states, or weights as well; arguments as for `ZeRO3`."""

    def __init__(
        self,
        requests: Requests,
        ordered: Sequence[LocalParameter],
        calls: HookedModules,
        options: StateOptions,
    ) -> None:
        super().__init__(requests, ordered, calls, options)
        self.is_last = False  # whether the step follows the micro-batch
        self.gradient_norms: dict[int, int] = {}  # parameter -> the storage of its gradient's norm
        self.sent: dict[int, int] = {}  # parameter that is gathered alone -> the storage of the rank's shard
        summed = "fp32" if options.sums_shards else options.compute
        self.returned = _label("gradient, copied back from host memory", summed, "P/N", "partition_grads")
        self.doubled = _label("gradient in double precision", "fp64", "P/N", "_constant_buffered_norm2")
        self.norm = _label("norm of a gradient", "fp64", "1", "norm_for_param_grads")
        self.copied = _label("gradient, copied to host memory", "fp32", "P/N", "_offload_grad_partition_at_boundary")
        source = f"{SOURCE}partition_parameters.py: all_gather_coalesced"
        component = Component.COMMUNICATION_BUFFERS
        self.shard = EngineTensor(component, "shards, copied from host memory", options.compute, "P/N", source)

    def wrap(self, weights: Sequence[int]) -> None:
        """Shard the parameters, and create the gradient bucket. Source: stage3.py, __init__."""
        take, drop = self.requests.take, self.requests.drop
        take(1)  # inf_or_nan_tracker
        drop(weights)
        self.requests.empty_cache()
        if not self.choice.host.has_weights:
            take(sum(self.shares[number] * self._bytes_of(number) for number in self.trained), 0, Component.WEIGHTS)
        take(self.choice.zero.reduce_bucket_size * self.dtype_bytes)
        for number in self.trained:  # create_reduce_and_remove_grad_hooks
            whole, share = take(self._whole_bytes(number)), self.shares[number] * self._bytes_of(number)
            drop((whole, take(share)) if self.choice.host.has_weights else (whole,))

    def updated(self, groups: OptimizerGroups) -> OptimizerGroups:
        """Return nothing: the host updates all."""
        del groups
        return []

    def begin(self, *, have_gradients: bool, last: bool) -> None:
        """Begin a micro-batch."""
        super().begin(have_gradients=have_gradients, last=last)
        self.is_last = last

    def _gather_alike(self, members: Sequence[int]) -> int:
        """All-gather parameters of one dtype, from shards that are copied to the device first."""
        buffer = super()._gather_alike(members)
        shards = self._sent(members, stream=self.gather)
        if len(members) == 1:
            self.sent.update(zip(members, shards, strict=False))
        else:
            self.requests.drop(shards)
        return buffer

    def _gather_now(self, number: int) -> None:
        if number not in self.there and number not in self.arriving:
            super()._gather_now(number)
            self.requests.drop(self._sent([number], stream=0))

    def _sent(self, numbers: Sequence[int], *, stream: int) -> list[int]:
        """Copy the rank's shards of weights in host memory to the device; return their storages."""
        if not self.choice.host.has_weights or self.ranks == 1:  # a single rank's shard is the parameter itself
            return []
        sizes = [self.shares[number] * self._bytes_of(number) for number in numbers]
        return [self.requests.take(size, stream, self.shard) for size in sizes]

    def _wait(self, number: int) -> None:
        """Wait for the all-gather of a parameter, which holds the rank's shard if it was gathered alone."""
        super()._wait(number)
        sent = self.sent.pop(number, None)
        self.requests.drop(() if sent is None else (sent,))

    def _keep(self, numbers: Sequence[int]) -> None:
        """Add the rank's shards of reduced gradients on the device, and copy them to the host."""
        take, drop = self.requests.take, self.requests.drop
        for number in numbers:
            share = self.shares[number]
            returned = take(share * self.summed, self.reduce, self.returned)
            if self.is_last:
                self._norm(number)
                if self.summed < FLOAT:
                    drop((take(share * FLOAT, self.reduce, self.copied),))
            drop((returned,))

    def _norm(self, number: int) -> None:
        take, drop, left = self.requests.take, self.requests.drop, self.shares[number]
        squares: list[int] = []
        while left > 0:
            elements = min(left, NORM_ELEMENTS)
            wide = take(elements * DOUBLE, self.reduce, self.doubled)
            norm = take(DOUBLE, self.reduce, self.norm)
            drop(
                (self.requests.play(reductions.norm(elements, self.choice.card, DOUBLE), self.norm, self.reduce), wide)
            )
            squares.append(take(DOUBLE, self.reduce, self.norm))
            drop((norm, *squares[1:]))
            del squares[1:]
            left -= elements
        root = take(DOUBLE, self.reduce, self.norm)
        before = self.gradient_norms.pop(number, None)
        drop(squares if before is None else (*squares, before))
        self.gradient_norms[number] = root

    def before_step(self, gradients: list[int]) -> None:
        """Free all gathered parameters; sum the squared norms over all ranks, once for each group.

        Source: stage3.py, step, complete_grad_norm_calculation_for_cpu_offload.
        """
        del gradients
        for number in [*self.arriving]:
            self._wait(number)
        for number in [*self.there]:
            self._release(number)
        for _ in self._sub_groups():
            self.requests.drop((self.requests.take(FLOAT, 0, Component.TEMPORARIES),))

    def after_step(self) -> None:
        """Free the norms, and gather the small parameters that stay gathered. Source: _post_step."""
        self.requests.drop(self.gradient_norms.values())
        self.gradient_norms = {}
        super().after_step()


def _label(tensor: str, dtype: str, symbol: str, rule: str) -> EngineTensor:
    return EngineTensor(Component.TEMPORARIES, tensor, dtype, symbol, f"{FILE}: {rule}")
