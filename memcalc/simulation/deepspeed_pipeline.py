"""Requests of one stage in DeepSpeed's pipeline engine (DeepSpeed 0.19 runtime/pipe/engine.py).

A stage receives into buffers that are allocated once, and copies what it has received; forward reads a second copy.
Pipeline buffers reference the input and the output of a micro-batch, until another one takes the buffer or the output
and the gradient of the input are sent. On the last stage they reference the logits, and through the graph of these the
input and its gradient, also between steps, as the loss of the newest micro-batch does. Gradients are reduced when all
micro-batches have run.
"""

from __future__ import annotations

from memcalc.layout.schedules import pipe_buffers
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.programs.sized_program import run_sizer
from memcalc.sharding.deepspeed_schedule import Instruction, commands
from memcalc.sharding.engines import arriving_gradients
from memcalc.simulation.construction.initial_tensors import InitialTensors
from memcalc.simulation.forward_backward import ForwardBackward
from memcalc.simulation.in_flight_batches import Recorded
from memcalc.simulation.layer_loops import LayerLoop
from memcalc.simulation.plans import plan_of
from memcalc.simulation.scheduled_run import ScheduledRun
from memcalc.simulation.stage_blocks import StageBlocks
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states.pipelining import passed_on
from memcalc.stream.requests import Requests

IDS = DTYPE_BYTES["int64"]
# Micro-batches of a step that are played. Logits outlive their micro-batch, so blocks are at other places for many of
# them: of 30 recorded stages with 8 or 16 micro-batches two reserve 5 and -6 % more than with three for each stage.
MOST_PLAYED = 32


class PipelineBatch:
    """A micro-batch on a stage, from its forward to the end of its backward.

    Args:
        recorded: the recorded parts of the stage's micro-batches.
        hidden_bytes: of the copy of the input that forward reads; 0: the stage has the embedding, which makes it.
    """

    def __init__(self, recorded: Recorded, hidden_bytes: int) -> None:
        self.recorded, self.hidden_bytes = recorded, hidden_bytes
        self.passing = recorded.passing
        self.new: dict[int, int] = {}
        self.copied: list[int] = []  # the copy of the input, which a variable references until the loss is there
        self.output: list[int] = []  # what is sent to the next stage

    def forward(self) -> None:
        """Run forward until the logits or the output exist. Source: _exec_forward_pass."""

        def walk() -> list[int]:
            given = self._copy()
            self.passing.forward(*given)
            return given if self.passing.parts.stage.has_head else [*given, self.passing.output]

        found = self.recorded.play("forward", self.new, walk)
        self.copied, self.output = (found[:1], found[1:]) if self.hidden_bytes else ([], found)

    def _copy(self) -> list[int]:
        if not self.hidden_bytes:
            return []
        number, entry = self.passing.parts.entry
        requests = self.recorded.requests
        made = requests.take(self.hidden_bytes, 0, self.passing.steps.labels(number)[entry])
        requests.hold(made)
        return [made]

    def loss(self) -> None:
        """Run the loss, if the stage has one, and forget the copy of the input."""
        if self.passing.parts.stage.has_head:

            def walk() -> list[int]:
                self.passing.loss()
                return []

            self.recorded.play("loss", self.new, walk)
        self.recorded.requests.drop(self.copied)

    def backward(self, gradient: int) -> tuple[list[int], list[int]]:
        """Run backward, which leaves the given gradient in its buffer, and free the output of a stage without head.

        Returns:
            The storages of parameter gradients, and that of the input's gradient, if the stage has received its input.
        """
        requests = self.recorded.requests

        def walk() -> list[int]:
            if gradient >= 0:
                requests.hold(gradient)
            gradients = self.passing.backward(gradient)
            return [*([self.passing.input_gradient] if self.hidden_bytes else []), *gradients]

        found = self.recorded.play("backward", self.new, walk)
        return (found[1:], found[:1]) if self.hidden_bytes else (found, [])

    def release(self) -> list[int]:
        """Free what backward has left but the logits and the loss; return the storages of these."""
        kept = self.recorded.play("release", self.new, lambda: self.passing.release(keeps_output=True))
        self.recorded.requests.drop(self.output)
        return kept


class DeepSpeedPipeline(ScheduledRun):
    """Recorder of the requests of one stage of DeepSpeed's pipeline engine. Arguments as for `SimulatedRun`."""

    def __init__(self, spec: Spec, requests: Requests, stage: Stage, rank: int | None = None) -> None:
        super().__init__(spec, requests, stage, rank)
        self.built = [built for built in self.built if not _is_input(built)]  # each stage loads what it reads
        stages = spec.parallelism.pipeline_parallel
        asked = spec.training.gradient_accumulation_steps
        played = min(asked, MOST_PLAYED)
        self.buffers = pipe_buffers(stages, self.stage.index, asked)
        # A step ends in the same buffer as with all micro-batches, so that the next one replaces the same outputs.
        self.micro_batches = played + (asked - played) % self.buffers
        self.commands = [*commands(stages, self.stage.index, self.micro_batches)]
        self.hidden_bytes = passed_on(spec).each
        self.ids_bytes = IDS * spec.training.sequences * spec.training.row_length
        self.recorded: dict[bool, Recorded] = {}  # by whether gradients exist
        self.batches: dict[int, PipelineBatch] = {}  # between forward and backward, by micro-batch
        self.inputs: dict[int, list[int]] = {}  # by buffer: ids, or the input of the stage behind its gradient
        self.labels: dict[int, list[int]] = {}  # by buffer
        self.outputs: dict[int, list[int]] = {}  # by buffer: what the logits and their graph reference
        self.loss: list[int] = []  # what the newest loss and its graph reference
        self.received = self.received_gradient = -1  # the buffers that are received into

    def _play_schedule(self) -> None:
        self.engine.prepare()
        run = {
            Instruction.LOAD: self._load,
            Instruction.RECEIVE_INPUT: self._receive_input,
            Instruction.FORWARD: self._forward_pass,
            Instruction.RECEIVE_GRADIENT: self._receive_gradient,
            Instruction.BACKWARD: self._backward_pass,
            Instruction.SEND_GRADIENT: self._send_gradient,
        }
        for instruction, micro_batch in self.commands:
            if instruction in run:
                run[instruction](micro_batch)
        self.gradients = self.engine.after_last_backward(self.gradients)

    def _load(self, micro_batch: int) -> None:
        """Load token and position ids on the first stage, labels on the last one. Source: _exec_load_micro_batch."""
        buffer = micro_batch % self.buffers
        if self.stage.has_embedding:
            self._assign(self.inputs, buffer, [self._ids(), self._ids()])
        if self.stage.has_head:
            self._assign(self.labels, buffer, [self._ids()])

    def _ids(self) -> int:
        return self.requests.take(self.ids_bytes, 0, Component.INPUTS)

    def _receive_input(self, micro_batch: int) -> None:
        """Receive into a buffer, and copy it. Source: _exec_recv_activations."""
        if self.received < 0:
            self.received = self.requests.take(self.hidden_bytes)
        self._assign(self.inputs, micro_batch % self.buffers, [self.requests.take(self.hidden_bytes)])

    def _receive_gradient(self, micro_batch: int) -> None:
        """Receive into the buffer of received inputs, if there is one. Source: _allocate_or_extend_buffers."""
        del micro_batch
        if self.received_gradient < 0:
            is_shared = self.received >= 0
            self.received_gradient = self.received if is_shared else self.requests.take(self.hidden_bytes)

    def _forward_pass(self, micro_batch: int) -> None:
        """Run forward; logits take the place of others and free their graph, and then the loss does."""
        self.requests.begin(f"forward_{self.number}")
        exist = micro_batch > 0
        if exist not in self.recorded:
            self.recorded[exist] = Recorded(self.requests, self._passing(exist=exist))
        hidden_bytes = 0 if self.stage.has_embedding else self.hidden_bytes
        batch = self.batches[micro_batch] = PipelineBatch(self.recorded[exist], hidden_bytes)
        batch.forward()
        buffer = micro_batch % self.buffers
        if self.stage.has_head:
            given = [] if self.stage.has_embedding else self.inputs[buffer]
            self._assign(self.outputs, buffer, self._held(given))
            self.requests.begin(f"loss_{self.number}")
        batch.loss()
        if self.stage.has_head:
            before, self.loss = self.loss, self._held(self.outputs[buffer])
            self.requests.drop(before)

    def _backward_pass(self, micro_batch: int) -> None:
        """Run backward; the input's gradient lives as long as the input."""
        self.requests.begin(f"backward_{self.number}")
        self.engine.begin(have_gradients=micro_batch > 0, last=micro_batch == self.micro_batches - 1)
        batch, buffer = self.batches.pop(micro_batch), micro_batch % self.buffers
        gradients, sent = batch.backward(self.received_gradient)
        self.gradients += gradients
        kept = batch.release()
        if sent:
            self.inputs[buffer] = [*sent, *self.inputs[buffer]]
        if self.stage.has_head:
            logits, loss = kept
            self.outputs[buffer] = [*self._held(sent), *self.outputs[buffer], logits]
            self.loss = [*self._held(sent), *self.loss, loss]

    def _send_gradient(self, micro_batch: int) -> None:
        """Forget the input and its gradient. Source: _exec_send_grads."""
        self._assign(self.inputs, micro_batch % self.buffers, [])

    def _assign(self, buffers: dict[int, list[int]], buffer: int, storages: list[int]) -> None:
        """Let a pipeline buffer reference storages, which frees those that it referenced before."""
        before, buffers[buffer] = buffers.get(buffer, []), storages
        self.requests.drop(before)

    def _held(self, storages: list[int]) -> list[int]:
        """Add an owner to each of some storages; return them."""
        for storage in storages:
            self.requests.hold(storage)
        return [*storages]

    def _passing(self, *, exist: bool) -> ForwardBackward:
        plan = plan_of(self.spec, self.stage)
        arriving = arriving_gradients(self.spec, self.engine, exist=exist)
        parts = StageBlocks(self.spec, self.stage, run_sizer(self.spec, self.card), arriving, plan)
        return ForwardBackward(
            self.requests, parts, (LayerLoop(plan),), self.engine, self.parameters, self.workspace.each, self.threads
        )


def _is_input(built: InitialTensors) -> bool:
    return all(made.component is Component.INPUTS for made in built.tensors) and bool(built.tensors)
