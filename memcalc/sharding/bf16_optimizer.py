"""DeepSpeed's BF16_Optimizer (DeepSpeed 0.19 runtime/bf16_optimizer.py), one rank.

It updates a rank's partition of fp32 master weights, as ZeRO stage 1. Each backward's gradients are added to a flat
tensor of all gradients, and zeroed before the next one; the step frees them. After the last micro-batch the flat tensor
is all-reduced in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.sharding.engine import ROOT, Engine, Gradient
from memcalc.sharding.parameter_groups import parameter_groups
from memcalc.sharding.zero0 import filled
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import EngineTensor, Requests

COMMUNICATED = DTYPE_BYTES["bf16"]  # runtime/engine.py, communication_data_type


class BF16Optimizer(Engine):
    """One rank.

    Args:
        requests: where they are recorded.
        ordered: all parameters, in registration order.
        options: state options of the run.
    """

    def __init__(self, requests: Requests, ordered: Sequence[LocalParameter], options: StateOptions) -> None:
        super().__init__(requests)
        trained = [each for each in ordered if each.trains]
        self.summed = DTYPE_BYTES[options.gradients or "fp32"]
        self.largest = max((each.elements for each in trained), default=0)
        members = parameter_groups(trained, range(len(trained)), options.zero)
        self.groups = [sum(trained[position].elements for position in each) for each in members]
        buffers, source = Component.COMMUNICATION_BUFFERS, "DeepSpeed 0.19 runtime/"
        self.reduced = EngineTensor(
            buffers, "gradients, all-reduced", "bf16", "P", f"{source}engine.py: allreduce_bucket"
        )
        name, source = "gradient of the largest parameter, cast", f"{source}bf16_optimizer.py: _update_hp_grad"
        self.cast = EngineTensor(Component.TEMPORARIES, name, options.gradients or "fp32", "P_matrix", source)

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:
        """Cast each gradient to add it to its sum when backward has ended. Source: _update_hp_grad."""
        if unit == ROOT and self.summed != COMMUNICATED:
            self.requests.drop((self.requests.take(self.summed * self.largest, 0, self.cast),))
        return super().after_backward(unit, gradients)

    def after_last_backward(self, gradients: list[int]) -> list[int]:
        """Reduce the sums, of which each parameter group has one tensor: several are copied into a buffer.

        Source: runtime/engine.py, _bf16_reduce_grads, allreduce_no_retain.
        """
        take, drop = self.requests.take, self.requests.drop
        for sizes in filled(self.groups):
            copied = [take(self.summed * sum(sizes), 0, self.reduced)] if len(sizes) > 1 else []
            cast = [take(COMMUNICATED * sum(sizes), 0, self.reduced)] if self.summed != COMMUNICATED else []
            drop((*cast, *copied))
        return gradients
