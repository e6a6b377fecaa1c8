"""DeepSpeed's BF16_Optimizer (DeepSpeed 0.19 runtime/bf16_optimizer.py), one rank.

It updates a rank's partition of fp32 master weights, as ZeRO stage 1. Each backward's gradients are added to a flat
tensor of all gradients, and zeroed before the next one; the step frees them. After the last micro-batch the flat tensor
is all-reduced in bf16. The sums are fp32; in the pipeline engine they may be bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.sharding.engine import ROOT, Engine, Gradient, OptimizerGroups
from memcalc.sharding.parameter_groups import parameter_groups
from memcalc.sharding.zero0 import BUFFER
from memcalc.sharding.zero12 import FLOAT, flat_group, partitions, reduced_together
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import EngineTensor, Requests
from memcalc.workspaces.reductions import norm

COMMUNICATED = DTYPE_BYTES["bf16"]  # runtime/engine.py, communication_data_type


class BF16Optimizer(Engine):
    """One rank.

    Args:
        requests: where they are recorded.
        ordered: all parameters, in registration order.
        options: state options of the run.
    """

    frees_gradients = True

    def __init__(self, requests: Requests, ordered: Sequence[LocalParameter], options: StateOptions) -> None:
        super().__init__(requests)
        self.options = options
        trained = [each for each in ordered if each.trains]
        self.width = DTYPE_BYTES[options.compute]
        self.summed = DTYPE_BYTES[options.gradients or "fp32"]
        self.members = parameter_groups(trained, range(len(trained)), options.zero)
        self.elements = [trained[position].elements for each in self.members for position in each]
        self.arriving = [trained[at].elements for each in self.members for at in each if not trained[at].unused]
        self.normed = [trained[at].elements for each in self.members for at in each if not trained[at].replica]
        ranks = options.data_parallel
        self.groups = [flat_group((trained[position] for position in each), ranks) for each in self.members]
        self.stepping: list[int] = []  # storages of gradients that the step frees
        self.wide: list[int] = []  # fp32 copies of a rank's partition of the sums
        self.has_norm = False
        buffers, source = Component.COMMUNICATION_BUFFERS, "DeepSpeed 0.19 runtime/"
        self.reduced = EngineTensor(
            buffers, "gradients, all-reduced", "bf16", "P", f"{source}engine.py: allreduce_bucket"
        )
        name, source = "gradient of the largest parameter, cast", f"{source}bf16_optimizer.py: _update_hp_grad"
        self.cast = EngineTensor(Component.TEMPORARIES, name, options.gradients or "fp32", "P_matrix", source)

    def wrap(self, weights: Sequence[int]) -> None:
        """Flatten the parameters; create the master weights and the sums. Source: _setup_for_real_optimizer."""
        take, drop = self.requests.take, self.requests.drop
        for group, positions in zip(self.groups, self.members, strict=True):
            whole = group.share * self.options.data_parallel
            padding = [take(group.padding * self.width)] if group.padding else []
            if len(positions) + len(padding) > 1:  # flattening does not copy a single tensor
                take(whole * self.width, 0, Component.WEIGHTS)
                drop((*padding, *(weights[position] for position in positions)))
            clone = take(group.share * self.width, 0, Component.MASTER_WEIGHTS)
            take(group.share * FLOAT, 0, Component.MASTER_WEIGHTS)
            drop((clone,))
            take(whole * self.summed, 0, Component.GRADIENTS)

    def updated(self, groups: OptimizerGroups) -> OptimizerGroups:
        """Return the rank's partition of each flat tensor, as one parameter."""
        return partitions(groups, self.groups)

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:
        """Cast each gradient to add it to its sum when backward has ended. Source: _update_hp_grad."""
        if unit == ROOT and self.summed != COMMUNICATED:
            for elements in self.arriving:
                self.requests.drop((self.requests.take(self.summed * elements, 0, self.cast),))
        return super().after_backward(unit, gradients)

    def after_last_backward(self, gradients: list[int]) -> list[int]:
        """Reduce the sums, of which each parameter group has one tensor: several are copied into a buffer.

        Source: runtime/engine.py, _bf16_reduce_grads, allreduce_no_retain.
        """
        take, drop = self.requests.take, self.requests.drop
        flat = (group.share * self.options.data_parallel for group in self.groups)
        for sizes in reduced_together(flat, BUFFER, int):
            copied = [take(self.summed * sum(sizes), 0, self.reduced)] if len(sizes) > 1 else []
            cast = [take(COMMUNICATED * sum(sizes), 0, self.reduced)] if self.summed != COMMUNICATED else []
            drop((*cast, *copied))
        return gradients

    def before_step(self, gradients: list[int]) -> None:
        """Compute the norm of all sums in fp32, and cast the rank's partition of them.

        The first step's norm is replaced by later ones of the same size. Source: runtime/utils.py,
        get_global_norm_of_tensors; bf16_optimizer.py, step.
        """
        take, drop = self.requests.take, self.requests.drop
        norms: list[int] = []
        for elements in self.normed:
            cast = [] if self.summed == FLOAT else [take(elements * FLOAT, 0, Component.TEMPORARIES)]
            norms.append(take(FLOAT, 0, Component.TEMPORARIES))
            drop((self.requests.play(norm(elements, self.options.card), Component.TEMPORARIES), *cast))
        stacked = take(len(norms) * FLOAT, 0, Component.TEMPORARIES)
        powers = take(len(norms) * FLOAT, 0, Component.TEMPORARIES)
        drop((stacked,))
        if not self.has_norm:
            take(FLOAT)
            self.has_norm = True
        drop((powers, *norms))
        if self.summed != FLOAT:
            self.wide = [take(group.share * FLOAT, 0, Component.GRADIENTS) for group in self.groups]
        self.stepping = gradients

    def after_step(self) -> None:
        """Free the gradients. Source: runtime/engine.py, _take_model_step."""
        self.requests.drop((*self.wide, *self.stepping))
        self.wide, self.stepping = [], []
