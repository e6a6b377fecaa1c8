"""Requests of one stage in Megatron-Core's 1F1B schedule: one forward, then one backward, after a warm-up of forwards.

Source: Megatron-LM core_v0.16.1 core/pipeline_parallel/schedules.py, forward_backward_pipelining_without_interleaving.
The variables of that function reference what it has received and what it sends until they are assigned again. A sent
output is freed at once (deallocate_output_tensor).
"""

from __future__ import annotations

from collections import deque

from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.programs.sized_program import run_sizer
from memcalc.sharding.engines import arriving_gradients
from memcalc.sharding.schedules import counted_micro_batches
from memcalc.simulation.forward_backward import ForwardBackward
from memcalc.simulation.in_flight_batches import InFlight, Recorded
from memcalc.simulation.layer_loops import LayerLoop
from memcalc.simulation.plans import plan_of
from memcalc.simulation.scheduled_run import ScheduledRun
from memcalc.simulation.stage_blocks import StageBlocks
from memcalc.spec.spec import Spec
from memcalc.states.megatron_buffers import sent_gradient
from memcalc.stream.requests import Requests

# Variables of the schedule, and an attribute of the model.
INPUT, OUTPUT = "input_tensor", "output_tensor"
INPUT_GRADIENT, OUTPUT_GRADIENT = "input_tensor_grad", "output_tensor_grad"
MODEL = "decoder.input_tensor"
NOTHING = -1  # no storage: the first stage receives no input, the last one no gradient


class MegatronPipeline(ScheduledRun):
    """Recorder of the requests of one pipeline stage of Megatron-Core. Arguments as for `SimulatedRun`."""

    def __init__(self, spec: Spec, requests: Requests, stage: Stage, rank: int | None = None) -> None:
        super().__init__(spec, requests, stage, rank)
        self.micro_batches = counted_micro_batches(spec)
        self.hidden_bytes = sent_gradient(spec).each
        self.recorded: Recorded | None = None
        self.waiting: deque[tuple[InFlight, int]] = deque()  # micro-batches between passes, with their inputs
        self.variables: dict[str, tuple[int, ...]] = {}  # variables of the schedule, and what they reference

    def _play_schedule(self) -> None:
        self.engine.prepare()
        self.engine.begin(have_gradients=False, last=True)
        warmup = min(self.micro_batches, self.spec.parallelism.pipeline_parallel - 1 - self.stage.index)
        steady = self.micro_batches - warmup
        for _ in range(warmup):
            self._receive_input()
            self._forward_pass()
            self._free_output()
        if steady:
            self._receive_input()
        for left in reversed(range(steady)):
            self._forward_pass()
            self._receive_gradient()
            self._free_output()
            self._next_input()
            self._backward_pass()
            if left:
                self._receive_input()
            else:
                self._assign(INPUT)
        for _ in range(warmup):
            self._next_input()
            self._receive_gradient()
            self._backward_pass()
        for name in (INPUT, OUTPUT, INPUT_GRADIENT, OUTPUT_GRADIENT):
            self._assign(name)

    def _receive_input(self) -> None:
        self._assign(INPUT, NOTHING if self.stage.has_embedding else self._buffer())

    def _receive_gradient(self) -> None:
        self._assign(OUTPUT_GRADIENT, NOTHING if self.stage.has_head else self._buffer())

    def _buffer(self) -> int:
        return self.requests.take(self.hidden_bytes, 0, Component.COMMUNICATION_BUFFERS)

    def _assign(self, name: str, *storages: int) -> None:
        """Let a variable take over storages, which frees those that it referenced before."""
        before = self.variables.pop(name, ())
        self.variables[name] = tuple(storage for storage in storages if storage != NOTHING)
        self.requests.drop(before)

    def _referenced(self, name: str) -> int:
        """Return the storage that a variable references."""
        (storage,) = self.variables.get(name) or (NOTHING,)
        return storage

    def _forward_pass(self) -> None:
        self.requests.begin(f"forward_{self.number}")
        given = self._referenced(INPUT)
        self._hold(given)
        self._assign(MODEL, given)
        if self.recorded is None:
            self.recorded = Recorded(self.requests, self._passing())
        batch = InFlight(self.recorded, given)
        if batch.forward() is None:
            self.requests.begin(f"loss_{self.number}")
            batch.loss()
        self._assign(OUTPUT)
        self._hold(given)
        self.waiting.append((batch, given))

    def _passing(self) -> ForwardBackward:
        plan = plan_of(self.spec, self.stage)
        arriving = arriving_gradients(self.spec, self.engine, exist=False)
        parts = StageBlocks(self.spec, self.stage, run_sizer(self.spec, self.card), arriving, plan)
        return ForwardBackward(
            self.requests, parts, (LayerLoop(plan),), self.engine, self.parameters, self.workspace.each, self.threads
        )

    def _free_output(self) -> None:
        """Free the output of the newest micro-batch, once it is sent."""
        newest, _ = self.waiting[-1]
        self.requests.drop(newest.output)
        newest.output = []

    def _next_input(self) -> None:
        """Let variables reference the input and the output of the oldest micro-batch."""
        _, given = self.waiting[0]
        self._assign(INPUT, given)
        self._assign(OUTPUT)

    def _backward_pass(self) -> None:
        """Run backward of the oldest micro-batch; its gradient is sent, and then a variable references it.

        The output still references the graph, and with it the input and the input's gradient. The model references the
        newest input until it is given another (forward_step, set_input_tensor).
        """
        self.requests.begin(f"backward_{self.number}")
        batch, given = self.waiting.popleft()
        _, sent = batch.backward(self._referenced(OUTPUT_GRADIENT))
        batch.release(keeps_output=False)
        self._assign(INPUT_GRADIENT, *sent)
        self._hold(given, *sent)
        self._assign(OUTPUT, given, *sent)
        if sent and self.variables[MODEL] == (given,):
            self._hold(given, *sent)
            self._assign(MODEL, given, *sent)

    def _hold(self, *storages: int) -> None:
        for storage in storages:
            if storage != NOTHING:
                self.requests.hold(storage)
