"""DeepSpeed without ZeRO (stage 0): every rank has all states (DeepSpeed 0.19 runtime/engine.py).

After the backward of the last micro-batch gradients are flattened into a buffer, reduced there, and copied back. The
optimizer updates fp32 weights themselves, but fp32 copies of 16-bit ones: copies of each parameter, or, if it is
DeepSpeed's own fused Adam, one flat tensor of each parameter group. Both update once with gradients of zeros when they
are made, which creates the optimizer's states.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.component import Component
from memcalc.sharding.engine import Engine, OptimizerGroups
from memcalc.sharding.overflow import check_overflow
from memcalc.sharding.parameter_groups import parameter_groups
from memcalc.sharding.zero12 import flat_tensor, reduced_together
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import EngineTensor, Requests
from memcalc.workspaces import reductions

BUFFER = 500_000_000  # elements; runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE
FLOAT = DTYPE_BYTES["fp32"]


class ZeRO0(Engine):
    """One rank with fp32 weights.

    Args:
        requests: where they are recorded.
        ordered: all parameters, in registration order.
        options: state options of the run.
        reduces_overflow: as for `check_overflow`.
    """

    frees_gradients = True

    def __init__(
        self, requests: Requests, ordered: Sequence[LocalParameter], options: StateOptions, *, reduces_overflow: bool
    ) -> None:
        super().__init__(requests)
        self.options = options
        self.reduces_overflow = reduces_overflow
        self.width = DTYPE_BYTES[options.compute]
        trained = [parameter for parameter in ordered if parameter.trains]
        self.trained = trained
        self.elements = [parameter.elements for parameter in trained]
        self.members = parameter_groups(trained, range(len(trained)), options.zero)  # positions
        self.groups = [[self.elements[position] for position in each] for each in self.members]
        source = "DeepSpeed 0.19 runtime/engine.py: allreduce_bucket"
        buffers = Component.COMMUNICATION_BUFFERS
        self.flattened = EngineTensor(buffers, "flattened gradients", options.compute, "P_buffer", source)
        self.stepping: list[int] = []  # storages of gradients that the step frees

    def updated(self, groups: OptimizerGroups) -> OptimizerGroups:
        """Return the parameters of each parameter group, not to be clipped again: see `before_step`."""
        return [
            (LocalParameters(parameters[position] for position in positions), options.without_clipping())
            for parameters, options in groups
            for positions in parameter_groups(parameters, range(len(parameters)), options.zero)
        ]

    def after_last_backward(self, gradients: list[int]) -> list[int]:
        """Reduce the gradients, zeros where there is none; return those that stay.

        Source: runtime/engine.py, _get_gradients_for_reduction, allreduce_no_retain, allreduce_and_copy.
        """
        unused = (parameter.elements * self.width for parameter in self.trained if parameter.unused)
        zeros = [self.requests.take(size, 0, Component.GRADIENTS) for size in unused]
        for sizes in reduced_together(self.elements, BUFFER, int):
            if len(sizes) > 1:  # flattening does not copy a single tensor
                self.requests.drop((self.requests.take(sum(sizes) * self.width, 0, self.flattened),))
        return [*gradients, *zeros]

    def before_step(self, gradients: list[int]) -> None:
        """Compute the norms for clipping; note the gradients, which the step frees.

        Source: runtime/utils.py, clip_grad_norm_.
        """
        if self.options.step.clips:
            norms = [self._norm(elements, casts=False) for elements in self.elements]
            stacked = self.requests.take(len(norms) * FLOAT, 0, Component.TEMPORARIES)
            self.requests.drop((stacked, *norms))
        self.stepping = gradients

    def after_step(self) -> None:
        """Free the gradients. Source: runtime/engine.py, _take_model_step."""
        self.requests.drop(self.stepping)
        self.stepping = []

    def _norm(self, elements: int, *, casts: bool) -> int:
        """Record the norm of a gradient, cast to fp32 if it is not; return its storage."""
        take, drop = self.requests.take, self.requests.drop
        wide = [take(elements * FLOAT, 0, Component.TEMPORARIES)] if casts else []
        norm = take(FLOAT, 0, Component.TEMPORARIES)
        drop((self.requests.play(reductions.norm(elements, self.options.card), Component.TEMPORARIES), *wide))
        return norm

    def _check_overflow(self) -> None:
        for elements in chain.from_iterable(self.groups):
            card, reduces = self.options.card, self.reduces_overflow
            check_overflow(self.requests, elements, self.width, card, reduces=reduces)


class ZeRO0Copies(ZeRO0):
    """One rank with an fp32 copy of each 16-bit parameter (runtime/fp16/unfused_optimizer.py, for bf16 as well)."""

    def wrap(self, weights: Sequence[int]) -> None:
        """Create the fp32 copies, each from a clone of the weight. Source: __init__."""
        del weights
        take, drop = self.requests.take, self.requests.drop
        for elements in chain.from_iterable(self.groups):
            clone = take(elements * self.width)
            take(elements * FLOAT, 0, Component.MASTER_WEIGHTS)
            drop((clone,))

    def zero_gradients(self) -> list[int]:
        """Allocate zeros for all weights and all fp32 copies. Source: initialize_optimizer_states."""
        return [
            self.requests.take(elements * width, 0, Component.GRADIENTS)
            for width in (self.width, FLOAT)
            for elements in chain.from_iterable(self.groups)
        ]

    def before_step(self, gradients: list[int]) -> None:
        """Check all gradients for overflow; then compute the norm of each group, and cast it. Source: step."""
        self._check_overflow()
        take, drop = self.requests.take, self.requests.drop
        wide: list[int] = []
        for group, members in zip(self.groups, self.members, strict=True):
            total: list[int] = []  # runtime/utils.py, get_weight_norm
            for elements in (self.elements[at] for at in members if not self.trained[at].replica):
                norm = self._norm(elements, casts=True)
                square = take(FLOAT, 0, Component.TEMPORARIES)
                total = total or [take(FLOAT, 0, Component.TEMPORARIES)]
                drop((square, norm))
            drop(total)
            wide += [take(elements * FLOAT, 0, Component.GRADIENTS) for elements in group]
        self.stepping = [*wide, *gradients]


class ZeRO0Flat(ZeRO0):
    """One rank with flat 16-bit weights and their fp32 copy for each group (runtime/fp16/fused_optimizer.py)."""

    def wrap(self, weights: Sequence[int]) -> None:
        """Flatten clones of the weights, which become views of the flat tensor, and copy it. Source: __init__."""
        take, drop = self.requests.take, self.requests.drop
        for positions, group in zip(self.members, self.groups, strict=True):
            flat = sum(group) * self.width
            clones = [take(elements * self.width, 0, Component.WEIGHTS) for elements in group]
            if len(clones) > 1:  # flattening does not copy a single tensor
                take(flat, 0, Component.WEIGHTS)
                drop(clones)
            drop(weights[position] for position in positions)
            clone = take(flat)
            take(sum(group) * FLOAT, 0, Component.MASTER_WEIGHTS)
            drop((clone,))

    def updated(self, groups: OptimizerGroups) -> OptimizerGroups:
        """Return the flat tensor of each parameter group."""
        return [(flat_tensor(sum(each)), own.without_clipping()) for _, own in groups for each in self.groups]

    def zero_gradients(self) -> list[int]:
        """Allocate zeros for the fp32 copies. Source: initialize_optimizer_states."""
        return [self.requests.take(sum(group) * FLOAT, 0, Component.GRADIENTS) for group in self.groups]

    def before_step(self, gradients: list[int]) -> None:
        """Check all gradients for overflow; cast and flatten them group by group; compute the norms. Source: step."""
        self._check_overflow()
        take, drop = self.requests.take, self.requests.drop
        flat: list[int] = []
        for group in self.groups:
            cast = [take(elements * FLOAT, 0, Component.GRADIENTS) for elements in group]
            if len(cast) > 1:
                flat.append(take(sum(group) * FLOAT, 0, Component.GRADIENTS))
                drop(cast)
            else:
                flat += cast
        drop(gradients)
        for group in self.groups:
            drop((self._norm(sum(group), casts=False),))
        self.stepping = flat


def engine_without_zero(
    requests: Requests, ordered: Sequence[LocalParameter], options: StateOptions, *, reduces_overflow: bool
) -> ZeRO0:
    """Return the engine of a rank, by its weights and its optimizer."""
    if RECIPES[options.recipe].master is None:
        return ZeRO0(requests, ordered, options, reduces_overflow=reduces_overflow)
    engine = ZeRO0Flat if options.zero.own_adam else ZeRO0Copies
    return engine(requests, ordered, options, reduces_overflow=reduces_overflow)
