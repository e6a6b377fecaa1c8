"""One rank of a pipeline: the micro-batches of its stage, in the order of torch.distributed.pipelining's schedules.

A stage receives into buffers that are allocated once, one for each micro-batch and direction. Sent activations stay
allocated until backward of their micro-batch has returned; sent gradients until the Python variable references the next
ones. Outputs are not merged (`schedule.step(..., return_outputs=False)`), so logits stay until backward has returned; a
variable references the newest ones until the next forward has returned.

Source: torch 2.13 distributed/pipelining/stage.py, _PipelineStageBase.forward_one_chunk, backward_one_chunk,
_setup_forward_recv_info, _create_grad_recv_info; schedules.py, ScheduleGPipe, Schedule1F1B, PipelineScheduleMulti.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.layout.stages import Stage
from memcalc.programs.sized_program import run_sizer
from memcalc.sharding.engine import Engine
from memcalc.sharding.schedules import Action, actions_of
from memcalc.simulation.forward_backward import ForwardBackward
from memcalc.simulation.in_flight_batches import InFlight, Recorded
from memcalc.simulation.layer_loops import LayerLoop
from memcalc.simulation.plans import plan_of
from memcalc.simulation.simulated_run import SimulatedRun
from memcalc.simulation.stage_blocks import StageBlocks
from memcalc.spec.spec import Spec
from memcalc.states.gradient_policy import gradient_policy
from memcalc.states.pipelining import passed_on
from memcalc.stream.requests import Requests


class Buffers(NamedTuple):
    """Receive buffers of one chunk: a storage for each micro-batch, or none at the first or last stage."""

    activations: list[int]
    gradients: list[int]


class SimulatedPipeline(SimulatedRun):
    """Recorder of the requests of one pipeline stage.

    Args:
        spec: the run.
        requests: where they are recorded.
        stage: the stage.
    """

    def __init__(self, spec: Spec, requests: Requests, stage: Stage) -> None:
        super().__init__(spec, requests, stage)
        self.micro_batches = spec.training.gradient_accumulation_steps
        self.buffers: dict[int, Buffers] = {}  # by chunk
        self.recorded: dict[tuple[int, bool], Recorded] = {}  # by chunk, and whether gradients exist
        self.in_flight: dict[tuple[int, int], InFlight] = {}  # by chunk and micro-batch
        self.variables: dict[str, list[int]] = {}  # Python variables of the schedule, and what they reference
        self.losses: list[int] = []

    def _run(self, phase: str) -> None:
        kind, _, number = phase.rpartition("_")
        if kind in ("loss", "backward"):  # with the forward: the parts of micro-batches alternate
            return
        if kind != "forward":
            super()._run(phase)
            return
        if not self.buffers:
            self._receive()
        self.engine.prepare()
        self.engine.begin(have_gradients=False, last=True)
        for action in actions_of(self.spec, self.stage):
            self._act(action, number)
        for name in list(self.variables):
            self._assign(name, [])
        self.requests.drop(self.losses)
        self.losses = []
        self.requests.begin(phase)

    def _receive(self) -> None:
        """Allocate the buffers: activations by chunk, then gradients from the last chunk on."""
        size = passed_on(self.spec).each
        chunks = self.stage.chunks

        def taken(*, receives: bool) -> list[int]:
            return [self.requests.take(size) for _ in range(self.micro_batches if receives else 0)]

        activations = [taken(receives=not chunk.has_embedding) for chunk in chunks]
        gradients = [taken(receives=not chunk.has_head) for chunk in reversed(chunks)]
        self.buffers = {
            number: Buffers(*each) for number, each in enumerate(zip(activations, reversed(gradients), strict=True))
        }

    def _act(self, action: Action, number: str) -> None:
        chunk, micro_batch = action.chunk, action.micro_batch
        key = chunk, micro_batch
        if action.kind == "assign":  # the schedule is about to assign a variable before the next part
            self._assign(action.variable, [])
        elif action.kind == "forward":
            self.requests.begin(f"forward_{number}")
            given = self.buffers[chunk].activations
            recorded = self._recorded(chunk, exist=bool(self.gradients) or micro_batch > 0)
            found = self.in_flight[key] = InFlight(recorded, given[micro_batch] if given else -1)
            output = found.forward()
            if action.variable:
                self._assign("output", [] if output is None else [output])
            if output is None:
                self.requests.begin(f"loss_{number}")
                found.loss()
            self._assign(action.variable, [] if output is None else [output])
        else:
            self.requests.begin(f"backward_{number}")
            given = self.buffers[chunk].gradients
            found = self.in_flight.pop(key)
            gradients, sent = found.backward(given[micro_batch] if given else -1)
            self.gradients += gradients
            kept = found.release()
            if kept:
                logits, loss = kept
                self.losses.append(loss)
                if action.newest:  # the variable `output` still references its logits
                    self._assign("output", [logits])
                self.requests.drop([logits])
            self._assign(action.variable, sent)
            self.requests.drop(sent)

    def _assign(self, name: str, storages: list[int]) -> None:
        """Assign storages to a variable, which drops the previous ones; "" is no variable."""
        if not name:
            return
        for storage in storages:
            self.requests.hold(storage)
        self.requests.drop(self.variables.pop(name, []))
        if storages:
            self.variables[name] = storages

    def _recorded(self, chunk: int, *, exist: bool) -> Recorded:
        if (chunk, exist) not in self.recorded:
            self.recorded[chunk, exist] = Recorded(self.requests, self._passing(self.stage.chunks[chunk], exist=exist))
        return self.recorded[chunk, exist]

    def _passing(self, chunk: Stage, *, exist: bool) -> ForwardBackward:
        arriving = gradient_policy(self.spec, exist=exist, sharded=False)
        plan = plan_of(self.spec, chunk)
        parts = StageBlocks(self.spec, chunk, run_sizer(self.spec, self.card), arriving, plan)
        # Only one backward of a step determines DDP's order of gradients: the others run under no_sync.
        engine = Engine(self.requests) if exist else self.engine
        return ForwardBackward(
            self.requests, parts, (LayerLoop(plan),), engine, self.parameters, self.workspace.each, self.threads
        )
