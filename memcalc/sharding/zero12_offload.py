"""ZeRO stages 1 and 2 with optimizer states in host memory (DeepSpeed 0.19 runtime/zero/stage_1_and_2.py), one rank.

Master weights, their gradients and the optimizer states are in host memory, where the step runs. No gradient stays on
the device: after the last micro-batch of a step, the norm of each reduced gradient of the rank's partition is computed
in double precision, it is checked for overflow, and copied in fp32 to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.sharding.engine import OptimizerGroups
from memcalc.sharding.overflow import check_overflow
from memcalc.sharding.zero12 import DOUBLE, FLOAT, SOURCE, WaitingGradient, ZeRO12
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import EngineTensor, Requests
from memcalc.workspaces import reductions

FILE = f"{SOURCE}stage_1_and_2.py"


class ZeRO12Offload(ZeRO12):
    """One rank at ZeRO stage 1 or 2 with offloaded optimizer states.

    Args:
        requests: where they are recorded.
        ordered: all parameters, in registration order.
        options: state options of the run.
        rank: as for `ZeRO12`.
        reduces_overflow: whether the check for overflow reduces a gradient to two numbers, instead of comparing an fp32
            copy of it elementwise.
        clones_large: whether a gradient larger than the bucket is cloned.
    """

    repeats = False  # the last micro-batch of a step makes other requests than those before it

    def __init__(
        self,
        requests: Requests,
        ordered: Sequence[LocalParameter],
        options: StateOptions,
        rank: int | None = None,
        *,
        reduces_overflow: bool = True,
        clones_large: bool = True,
    ) -> None:
        super().__init__(requests, ordered, options, rank)
        self.reduces_overflow = reduces_overflow
        self.clones_large = clones_large
        self.is_last = False  # whether the step follows the micro-batch
        self.norms: dict[WaitingGradient, int] = {}  # the storage of each gradient's norm
        self.copied = _label("gradient, copied to host memory", "fp32", "P", "async_inplace_copy_grad_to_fp32_buffer")
        self.doubled = _label("gradient in double precision", "fp64", "P", "set_norm_for_param_grad_in_gpu")
        self.norm = _label("norm of a gradient", "fp64", "1", "norm_for_param_grads")
        self.checked = _label("check for overflow", options.compute, "P", "update_offload_overflow_tracker")
        self.large = _label("gradient larger than the bucket, cloned", options.compute, "P", "grad_reduc")

    def wrap(self, weights: Sequence[int]) -> None:
        """Flatten the parameters; the rank's partition is copied to the host. Source: __init__."""
        for _, clone in self._flatten(weights):
            self.requests.drop((clone,))
        largest = max(each.elements for each in self.trained)
        self.requests.take(largest * self.dtype_bytes)  # temp_grad_buffer_for_gpu_offload

    def updated(self, groups: OptimizerGroups) -> OptimizerGroups:
        """Return nothing: the host updates all."""
        del groups
        return []

    def begin(self, *, have_gradients: bool, last: bool) -> None:
        """Begin a micro-batch."""
        super().begin(have_gradients=have_gradients and self.keeps_gradients, last=last)
        self.is_last = last

    def _into_bucket(self, position: int, storage: int) -> None:
        """Put a gradient into the bucket; a larger one is cloned, which gives it a storage of its own."""
        size = self.trained[position].elements * self.dtype_bytes
        if self.clones_large and size > self.bucket_size * self.dtype_bytes:
            if self.inside:
                self._reduce()
            clone = self.requests.take(size, 0, self.large)
            self.requests.drop((storage,))
            storage = clone
        super()._into_bucket(position, storage)

    def _keep(self, gradient: WaitingGradient) -> None:
        """Copy a reduced gradient of the rank's partition to the host. Source: copy_grads_in_partition.

        Before the last micro-batch it is added to the sum in host memory, through a buffer that exists already.
        """
        if not self.is_last:
            return
        elements = self._own_elements(gradient)
        self._norm(gradient, elements)
        self._check_overflow(gradient.elements, self.dtype_bytes)
        if self.dtype_bytes < FLOAT:
            self.requests.drop((self.requests.take(elements * FLOAT, self.stream, self.copied),))

    def _own_elements(self, gradient: WaitingGradient) -> int:
        """Return the elements of a gradient that are in the rank's partition."""
        own = self.groups[gradient.group].partition
        return min(gradient.begin + gradient.elements, own.stop) - max(gradient.begin, own.start)

    def _check_overflow(self, elements: int, width: int) -> None:
        check_overflow(
            self.requests,
            elements,
            width,
            self.choice.card,
            reduces=self.reduces_overflow,
            stream=self.stream,
            label=self.checked,
        )

    def _norm(self, gradient: WaitingGradient, elements: int) -> None:
        requests = self.requests
        wide = requests.take(elements * DOUBLE, self.stream, self.doubled)
        norm = requests.take(DOUBLE, self.stream, self.norm)
        requests.drop(
            (requests.play(reductions.norm(elements, self.choice.card, DOUBLE), self.norm, self.stream), wide)
        )
        before = self.norms.pop(gradient, None)
        requests.drop(() if before is None else (before,))
        self.norms[gradient] = norm

    def _own_gradients(self) -> list[int]:
        """Return nothing: no gradient stays on the device."""
        return []

    def before_step(self, gradients: list[int]) -> None:
        """Sum the squared norms over all ranks, once for each parameter group; free the norms.

        Source: complete_grad_norm_calculation_for_cpu_offload, reset_cpu_buffers.
        """
        self.requests.drop(gradients)
        for _ in self.groups:
            self.requests.drop((self.requests.take(FLOAT, 0, Component.TEMPORARIES),))
        self.requests.drop(self.norms.values())
        self.norms = {}


def _label(tensor: str, dtype: str, symbol: str, rule: str) -> EngineTensor:
    return EngineTensor(Component.TEMPORARIES, tensor, dtype, symbol, f"{FILE}: {rule}")
