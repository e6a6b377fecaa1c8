"""ZeRO stage 2 with gradients that are summed in fp32 (DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py), one rank.

Gradients are reduced in 16 bits. The rank's slices of them are added to an fp32 tensor of its partition, which the
first of them allocates, and which the step reads and frees (data_types.grad_accum_dtype).
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.sharding.zero12 import FLOAT, WaitingGradient, ZeRO12, bucket_slices
from memcalc.sharding.zero12_offload import ZeRO12Offload


class ZeRO2Sums(ZeRO12):
    """One rank; arguments as for `ZeRO12`."""

    summed: Sequence[int] = ()  # groups that have sums, in the order of their storages
    sums: Sequence[int] = ()  # these storages

    def _reduce(self) -> None:
        """Reduce the bucket, and add the rank's slices to the sums.

        Source: average_tensor, allreduce_and_copy_with_multiple_ranks, _add_to_grad_partition_buffer.
        """
        take, drop = self.requests.take, self.requests.drop
        slices = bucket_slices(self.waiting, self.groups, own_apart=True)
        for each in slices:
            if each.is_own and not self.have_gradients and each.group not in self.summed:
                size = self.groups[each.group].share * FLOAT
                self.summed = [*self.summed, each.group]
                self.sums = [*self.sums, take(size, self.stream, self.labels.sums)]
        for together in self._together(slices):
            flat = self._flattened(together)
            for each in together:
                if each.is_own:
                    drop((take(each.elements * FLOAT, self.stream, self.labels.cast),))
            drop(flat)
        self._keep_own()

    def _keep(self, gradient: WaitingGradient) -> None:
        """Do nothing: a gradient of the rank's partition is in the sums."""

    def _own_gradients(self) -> list[int]:
        """Return the sums if this micro-batch has allocated them."""
        return [] if self.have_gradients else [*self.sums]

    def before_update(self, number: int) -> None:
        """Copy nothing: the update reads the sums."""

    def after_update(self, number: int) -> None:
        """Free the sums of a group. It has none if the rank's partition is padding alone."""
        if number in self.summed:
            self.requests.drop((self.stepping[self.summed.index(number)],))


class ZeRO2SumsOffload(ZeRO2Sums, ZeRO12Offload):
    """One rank with optimizer states in host memory, to which the step's last micro-batch copies the sums."""

    def begin(self, *, have_gradients: bool, last: bool) -> None:
        """Begin a micro-batch: the first one of a step allocates the sums."""
        super().begin(have_gradients=have_gradients, last=last)
        self.have_gradients = have_gradients
        if not have_gradients:
            self.summed, self.sums = [], []

    def _keep(self, gradient: WaitingGradient) -> None:
        """Compute the norm of the rank's slice and check it for overflow. Source: copy_grads_in_partition."""
        if self.is_last:
            elements = self._own_elements(gradient)
            self._norm(gradient, elements)
            self._check_overflow(elements, FLOAT)
