"""One rank of a pipeline: the micro-batches of its stage, in the order of torch.distributed.pipelining's schedules.

A stage receives into buffers that are allocated once, one for each micro-batch and direction. Sent activations stay
allocated until backward of their micro-batch has returned; sent gradients until the Python variable references the next
ones. Schedules of several chunks keep all that a step has sent until its end. Outputs are not merged
(`schedule.step(..., return_outputs=False)`), so logits stay until backward has returned; a variable references the
newest ones until the next forward has returned.

Source: torch 2.13 distributed/pipelining/stage.py, _PipelineStageBase.forward_one_chunk, backward_one_chunk,
_setup_forward_recv_info, _create_grad_recv_info; schedules.py, ScheduleGPipe, Schedule1F1B, PipelineScheduleMulti.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter, stage_parameters
from memcalc.layout.parameters import layer_prefixes
from memcalc.layout.stages import Stage
from memcalc.programs.sized_program import run_sizer
from memcalc.sharding.engine import Engine, by_unit
from memcalc.sharding.engines import engine_of, gradient_names
from memcalc.sharding.schedules import SEND_OPS, Action, actions_of, played_micro_batches
from memcalc.simulation.forward_backward import ForwardBackward
from memcalc.simulation.in_flight_batches import InFlight, Recorded
from memcalc.simulation.layer_loops import LayerLoop
from memcalc.simulation.plans import plan_of
from memcalc.simulation.scheduled_run import ScheduledRun
from memcalc.simulation.shape_inference import ShapeInference, infers_shapes
from memcalc.simulation.stage_blocks import StageBlocks
from memcalc.spec.spec import Spec
from memcalc.states.gradient_policy import gradient_policy
from memcalc.states.optimizers.parameter_order import in_order
from memcalc.states.pipelining import passed_on
from memcalc.stream.requests import Requests


class Buffers(NamedTuple):
    """Receive buffers of one chunk: a storage for each micro-batch, or none at the first or last stage."""

    activations: list[int]
    gradients: list[int]


class ShardedChunk(NamedTuple):
    """A chunk's layers, its engine, and its parameters of each unit by the names of their gradients."""

    stage: Stage
    engine: Engine
    parameters: Mapping[int, Mapping[str, LocalParameter]]


class SimulatedPipeline(ScheduledRun):
    """Recorder of the requests of one pipeline stage."""

    def __init__(self, spec: Spec, requests: Requests, stage: Stage) -> None:
        super().__init__(spec, requests, stage)
        self.micro_batches = spec.training.gradient_accumulation_steps
        self.played = played_micro_batches(spec)
        self.chunks = [*map(self._chunk, range(len(self.stage.chunks)))]
        self.buffers: dict[int, Buffers] = {}  # by chunk
        self.recorded: dict[tuple[int, bool], Recorded] = {}  # by chunk, and whether gradients exist
        self.in_flight: dict[tuple[int, int], InFlight] = {}  # by chunk and micro-batch
        self.variables: dict[str, list[int]] = {}  # Python variables of the schedule, and what they reference
        self.losses: list[int] = []

    def _chunk(self, number: int) -> ShardedChunk:
        """Return one of several chunks with an engine around it; the stage's own engine, if it is the only one."""
        chunk, choice = self.stage.chunks[number], self.choice
        if len(self.stage.chunks) == 1 or self.engine.keeps_gradients:
            return ShardedChunk(chunk, self.engine, self.parameters)
        prefixes = layer_prefixes(self.spec.model, chunk.numbers)
        ordered = tuple(in_order(stage_parameters(self.spec, chunk), choice.update.family, prefixes))
        units = by_unit(ordered, chunk.numbers, choice.fsdp)
        engine = engine_of(self.requests, ordered, units, self.spec, plan_of(self.spec), chunk=number)
        return ShardedChunk(chunk, engine, gradient_names(self.spec, units))

    def _play_schedule(self) -> None:
        if not self.buffers:
            self._receive()
        for each in self.chunks:
            each.engine.prepare()
            each.engine.begin(have_gradients=bool(self.gradients), last=True)
        actions = [*actions_of(self.spec, self.stage)]
        if any(action.variable == SEND_OPS for action in actions):
            self._send_unplayed()
        for action in actions:
            self._act(action)
        for storages in self.variables.values():
            self.requests.drop(reversed(storages))
        self.variables = {}
        self._forget_losses()

    def _send_unplayed(self) -> None:
        """Allocate what micro-batches that are not recorded have sent: the schedule references it until the end."""
        others = (self.micro_batches - self.played) * self.stage.sends
        self.variables[SEND_OPS] = [self.requests.take(passed_on(self.spec).each) for _ in range(others)]

    def _forget_losses(self) -> None:
        """Drop the losses of all micro-batches. Source: schedules.py, _update_losses."""
        self.requests.drop(self.losses)
        self.losses = []

    def _receive(self) -> None:
        """Allocate the buffers: activations by chunk, then gradients from the last chunk on."""
        size, chunks = passed_on(self.spec).each, self.stage.chunks
        passes = [self._inference(number, size) for number in range(len(chunks))] if infers_shapes(self.spec) else []

        def taken(*, receives: bool) -> list[int]:
            return [self.requests.take(size) for _ in range(self.micro_batches if receives else 0)]

        activations, gradients = list[list[int]](), list[list[int]]()
        for number, chunk in enumerate(chunks):
            if passes:
                passes[number].forward()
            activations.append(taken(receives=not chunk.has_embedding))
        for number, chunk in reversed([*enumerate(chunks)]):
            if passes:
                passes[number].backward()
            gradients.append(taken(receives=not chunk.has_head))
        for each in passes:
            each.reshard()
        self.buffers = {
            number: Buffers(*each) for number, each in enumerate(zip(activations, reversed(gradients), strict=True))
        }

    def _inference(self, number: int, size: int) -> ShapeInference:
        passing = self._passing(number, exist=False, inputs_only=True)
        return ShapeInference(self.requests, passing, size)

    def _act(self, action: Action) -> None:
        chunk, micro_batch = action.chunk, action.micro_batch
        key = chunk, micro_batch
        engine = self.chunks[chunk].engine
        if action.kind == "assign":  # the schedule is about to assign a variable before the next part
            self._assign(action.variable, [])
        elif action.kind == "unshard":
            engine.unshard()
        elif action.kind == "reshard":
            engine.reshard()
        elif action.kind == "reduce":
            if len(self.chunks) == 1:  # schedules of several chunks forget the losses at the end
                self._forget_losses()
            self.gradients += engine.reduce_gradients()
        elif action.kind == "forward":
            self.requests.begin(f"forward_{self.number}")
            given = self.buffers[chunk].activations
            exist = micro_batch > 0 or (engine.keeps_gradients and bool(self.gradients))
            recorded = self._recorded(chunk, exist=exist)
            found = self.in_flight[key] = InFlight(recorded, given[micro_batch] if given else -1)
            output = found.forward()
            if action.variable != SEND_OPS:
                self._assign("output", [] if output is None else [output])
            if output is None:
                self.requests.begin(f"loss_{self.number}")
                found.loss()
            self._assign(action.variable, [] if output is None else [output])
        else:
            self.requests.begin(f"backward_{self.number}")
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
        """Assign storages to a variable, which drops the previous ones; append them, if it is a list."""
        for storage in storages:
            self.requests.hold(storage)
        before = self.variables.pop(name, [])
        if name == SEND_OPS:
            storages = [*before, *storages]
        else:
            self.requests.drop(before)
        if storages:
            self.variables[name] = storages

    def _recorded(self, number: int, *, exist: bool) -> Recorded:
        key = number, exist
        if key not in self.recorded or not self.chunks[number].engine.repeats:
            self.recorded[key] = Recorded(self.requests, self._passing(number, exist=exist))
        return self.recorded[key]

    def _passing(self, number: int, *, exist: bool, inputs_only: bool = False) -> ForwardBackward:
        chunk, engine, parameters = self.chunks[number]
        arriving = gradient_policy(self.spec, exist=exist, sharded=not engine.keeps_gradients)
        plan = plan_of(self.spec, chunk)
        parts = StageBlocks(self.spec, chunk, run_sizer(self.spec, self.card), arriving, plan)
        # Only one backward of a step determines DDP's order of gradients: the others run under no_sync.
        if exist and engine.keeps_gradients:
            engine = Engine(self.requests)
        return ForwardBackward(
            self.requests,
            parts,
            (LayerLoop(plan),),
            engine,
            parameters,
            self.workspace.each,
            self.threads,
            inputs_only=inputs_only,
        )
