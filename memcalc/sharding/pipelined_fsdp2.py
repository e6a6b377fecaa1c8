"""FSDP2 of one chunk of a pipeline stage, in the schedules of torch.distributed.pipelining (torch 2.13).

Until the last micro-batch of a step, no backward reshards parameters or reduces gradients: the gathered parameters and
the sums of unsharded gradients stay allocated. After the last one, all units are resharded and reduced in the order of
their modules. Parameters that forward does not reshard (stage 2) are gathered once per step. Schedules of several
chunks gather all units of a chunk on the default stream before they run it.

Source: torch 2.13 distributed/pipelining/stage.py, backward_maybe_with_nosync, perform_reduce_grad; schedules.py,
_PipelineScheduleRuntime (UNSHARD, RESHARD, REDUCE_GRAD).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.sharding.engine import EMBEDDING, ROOT, TAIL, Gradient
from memcalc.sharding.fsdp2 import ALL_GATHER, ALL_REDUCE, FSDP2, REDUCE_SCATTER
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import Label, Requests

DEFAULT_STREAM = 0
STREAMS = 3  # of each chunk: for all-gathers, reduce-scatters and all-reduces


class PipelinedFSDP2(FSDP2):
    """One rank of FSDP2 around a chunk.

    Args:
        requests: the list of requests to record to.
        units: the parameters of each unit of the chunk, in registration order.
        options: state options of the run.
        chunk: number of the chunk on its stage; each is a root module, with separate CUDA streams.
    """

    def __init__(
        self,
        requests: Requests,
        units: Mapping[int, Sequence[LocalParameter]],
        options: StateOptions,
        chunk: int = 0,
    ) -> None:
        super().__init__(requests, units, options)
        self.counts_sums = False
        self.infers = False
        self.repeats = False  # only a step's first micro-batch gathers, and creates sums
        self.all_gather_stream = ALL_GATHER + STREAMS * chunk
        self.reduce_scatter_stream = REDUCE_SCATTER + STREAMS * chunk
        self.all_reduce_stream = ALL_REDUCE + STREAMS * chunk
        layers = sorted(unit for unit in self.sizes if unit >= 0)
        self.in_order = [unit for unit in (ROOT, EMBEDDING, *layers, TAIL) if unit in self.sizes]

    def existing(self) -> list[int]:
        """Record the unsharded sums, which are then counted with the gradients."""
        self.counts_sums = True
        return super().existing()

    def hold_gathered(self) -> None:
        """Record the parameters of all units, which backward leaves gathered."""
        for unit in self.in_order:
            self.parameters[unit] = self._gathered(unit, Component.COMMUNICATION_BUFFERS)

    def gather_before_backward(self) -> None:
        """Record the parameters of the units that forward has resharded."""
        for unit in [unit for unit in self.in_order if unit not in self.parameters]:
            with self.requests.repeat(self.rounds.get(unit, 1)):
                self.parameters[unit] = self._gathered(unit, self.labels[unit].gathered)

    def _gathered(self, unit: int, label: Label) -> list[int]:
        return [self.requests.take(size, 0, label) for size in self.sizes[unit][0].parameters]

    def resume(self) -> None:
        """Reshard what the forward before has resharded; with earlier sums, a backward has gathered it again.

        An evaluation begins with nothing gathered.
        """
        for unit in () if self.unsharded else [unit for unit in self.in_order if unit in self.parameters]:
            with self.requests.repeat(self.rounds.get(unit, 1)):
                self.after_forward(unit)

    def begin(self, *, have_gradients: bool, last: bool) -> None:
        """Begin a micro-batch, which reduces nothing; sharded gradients exist only if `zero_grad` keeps them."""
        super().begin(have_gradients=have_gradients and self.choice.step.zeroes_gradients, last=last)

    def begin_inference(self) -> None:
        """Begin the first pass, in which each backward reshards its unit."""
        self.infers = True

    def end_inference(self) -> None:
        """Free what no backward has resharded, such as a chunk with the embedding."""
        self.infers = False
        self.reshard()

    def before_forward(self, unit: int) -> None:
        """Pre-forward; the root's waits for the units that the schedule has gathered."""
        if unit == ROOT:
            self._wait_for_unshard()
        super().before_forward(unit)

    def before_backward(self, unit: int) -> None:
        """Pre-backward; the root's waits for the units that the schedule has gathered."""
        if unit == ROOT:
            self._wait_for_unshard()
        super().before_backward(unit)

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:
        """Post-backward: keep the unsharded gradients, and the gathered parameters."""
        if self.infers:
            return super().after_backward(unit, gradients)
        self._add_up(unit, gradients)
        return []

    def unshard(self) -> None:
        """Gather all units on the default stream, as `unshard(async_op=True)` of each module does."""
        for unit in self.in_order:
            if unit not in self.parameters:
                self._all_gather(unit, DEFAULT_STREAM)

    def reshard(self) -> None:
        """Free the gathered parameters of all units."""
        for unit in self.in_order:
            self.requests.drop(self.parameters.pop(unit, ()))

    def reduce_gradients(self) -> list[int]:
        """Reshard and reduce all units in the order of their modules. Source: stage.py, perform_reduce_grad."""
        kept: list[int] = []
        for rounds, units in groupby(self.in_order, key=lambda unit: self.rounds.get(unit, 1)):
            with self.requests.repeat(rounds):
                for unit in units:
                    self.requests.drop(self.parameters.pop(unit, ()))
                    kept += self._reduce_unit(unit, ())
        self._finalize()
        return kept

    def _label_of_sums(self, unit: int) -> Label:
        """Return the label of a unit's sums: they are rows of their own, unless they are counted with the gradients."""
        return super()._label_of_sums(unit) if self.counts_sums else self.labels[unit].sums

    def _stays(self, unit: int) -> bool:
        """Return whether a unit is not resharded after forward: a stage without LM head has no tied embedding."""
        return unit == TAIL or (unit == self.last and self.choice.fsdp.gathers_last_layer_once)

    def _wait_for_unshard(self) -> None:
        for unit in [unit for unit in self.in_order if unit in self.gathering]:
            self.requests.drop((self._copy_out(unit),))
