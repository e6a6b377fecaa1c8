"""Recorder of the passes of a step, or of an evaluation, on one chunk of a stage, without sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter, LocalParameters, stage_parameters, without_companions
from memcalc.layout.parameters import layer_prefixes
from memcalc.layout.schedules import uses_pipelining
from memcalc.layout.stages import Stage
from memcalc.ledger.row_drafts import EVALUATION
from memcalc.programs.program import Program
from memcalc.programs.sized_program import ProgramSizer, SizedProgram
from memcalc.sharding.engine import Engine, by_unit
from memcalc.sharding.engines import (
    arriving_gradients,
    engine_of,
    gradient_names,
    reference_engine_of,
)
from memcalc.simulation.evaluation import FrozenModel, evaluated, evaluates_between_steps, frozen_model, reference_run
from memcalc.simulation.forward_backward import ForwardBackward
from memcalc.simulation.layer_loops import LayerLoop, loops_of, of_layers
from memcalc.simulation.plans import plan_of
from memcalc.simulation.stage_blocks import SizedBlock, StageBlocks
from memcalc.spec.recompute_plan import leaves
from memcalc.spec.scoring import scored_by_reference, scores_itself
from memcalc.spec.spec import Spec
from memcalc.states.optimizers.parameter_order import in_order
from memcalc.states.pipelining import drains, keeps_passed_on, keeps_sent
from memcalc.states.state_options import state_options
from memcalc.stream.peaks import SizelessStream
from memcalc.stream.requests import NamedRounds, Requests

EXISTING, IN_FLIGHT = "existing", "in flight"  # labels: gradients of earlier micro-batches, others in flight
POLICY, FROZEN = "policy", "frozen"  # the trained model, and a reference model or a teacher
THREADS = ("forward", "backward")  # each has a cuBLAS workspace


class HeldInLoop(NamedTuple):
    """Live storages of each round of a loop."""

    rounds: NamedRounds
    storages: list[int]


class Layers:
    """The layers of a chunk, for recording.

    Args:
        spec: the run.
        chunk: the chunk.
        model: the model of the layers, a part of the loops' names.
    """

    def __init__(self, spec: Spec, chunk: Stage, model: str = POLICY) -> None:
        self._spec, self._chunk, self._options = spec, chunk, state_options(spec)
        plan, options = plan_of(spec, chunk), self._options
        # DeepSpeed's buckets and prefetches span layers; its stage 1 reduces only after backward.
        as_loops = not (options.partitions_gradients and options.zero_stage > 1)
        played = loops_of(spec, plan) if as_loops else (LayerLoop(plan),)
        # Loops of items of the recomputation plan, and the numbers of these layers.
        self.played = tuple(
            loop._replace(rounds=NamedRounds(loop.rounds, (model, index))) if loop.rounds > 1 else loop
            for index, loop in enumerate(played)
        )
        self.numbers = tuple(layer for loop in self.played for item in loop.items for layer in leaves(item))

    @cached_property
    def _whole(self) -> LocalParameters:
        return without_companions(stage_parameters(self._spec, self._chunk))

    @cached_property
    def ordered(self) -> tuple[LocalParameter, ...]:
        """Parameters of these layers, the embedding and the LM head, in registration order."""
        some = of_layers(self._whole, self._spec, self._chunk, self.numbers)
        return tuple(in_order(some, self._options.update.family, layer_prefixes(self._spec.model, self.numbers)))

    @cached_property
    def of_engine(self) -> tuple[LocalParameter, ...]:
        """Parameters of the engine: DeepSpeed flattens the parameters of all layers."""
        options, chunk = self._options, self._chunk
        reduces_all = options.flattens_weights or options.step.pipelined
        if not reduces_all or len(self.numbers) == chunk.stop - chunk.first:
            return self.ordered
        prefixes = layer_prefixes(self._spec.model, range(chunk.first, chunk.stop))
        return tuple(in_order(self._whole, options.update.family, prefixes))


class UnitSizes(SizedProgram):
    """A program with storages of one byte each, because a recording has no sizes."""

    @cached_property
    def exact(self) -> list[int]:
        """The sizes of the storages: one byte each."""
        return [1] * len(self.program.storages)


class UnitSizer(ProgramSizer):
    """The sizer of recordings."""

    def __init__(self) -> None:
        super().__init__({})

    def sized(self, program: Program) -> SizedProgram:
        """Return the program with unit sizes."""
        return UnitSizes(program, {})


class StepRecorder:
    """Recorder of the passes of one chunk of a stage.

    Args:
        spec: the run.
        chunk: the chunk.
        workspace: whether backward's first matmul allocates cuBLAS's workspace.
        rank: the data-parallel rank; None: the one that `engine_of` takes.
    """

    def __init__(self, spec: Spec, chunk: Stage, *, workspace: bool, rank: int | None = None) -> None:
        self.requests = Requests()
        self.blocks: list[SizedBlock] = []
        self.spec, self.chunk, self.workspace, self.rank = spec, chunk, workspace, rank
        self.keeps_passed_on = keeps_passed_on(spec)

    def step(self, *, exist: bool, after_forward: bool = True) -> RecordedStream:
        """Record forward, loss and backward.

        Args:
            exist: whether gradients of earlier micro-batches exist.
            after_forward: whether a forward ran since the last backward.
        """
        self.requests.begin(EXISTING)
        walk, gradients = self._walk(self.spec, exist=exist)
        walk.engine.hold_gathered()
        takes_over = bool(self.requests.labels)
        self.requests.begin(IN_FLIGHT)
        walk.engine.resume()
        if evaluates_between_steps(self.spec):
            walk.engine.after_evaluation()
        in_flight = [*self._hold_in_flight(walk)]
        self.requests.begin("forward")
        walk.engine.prepare()
        walk.engine.begin(have_gradients=exist, last=True)
        passed_on: list[int] = []  # what DeepSpeed's buffers or PyTorch's schedule reference
        if self.keeps_passed_on and not self.chunk.has_embedding:
            passed_on.append(self._received(walk))  # forward reads a copy
        walk.forward(self._received(walk))
        if not self.chunk.has_head and (self.keeps_passed_on or keeps_sent(self.spec)):
            passed_on.append(walk.output)
        elif not self.chunk.has_head:
            self.requests.drop([walk.output])  # sent; the receive buffers are counted as persistent memory
        self.requests.begin("loss")
        of_frozen, kept = range(0), list[int]()
        if self.chunk.has_head:
            other = frozen_model(self.spec, self.chunk)
            if other is not None and other.name:
                of_frozen = self._taught(other, walk)
            else:
                walk.loss()
                of_frozen, kept = self._scores(self.spec, walk.engine)
                walk.end_scoring()
        if not after_forward:
            walk.engine.gather_before_backward()
        self.requests.begin("backward")
        gradients += walk.backward(self._received_gradient(walk))
        if drains(self.spec):  # no micro-batch is in flight after the last backward
            walk.release(keeps_output=not uses_pipelining(self.spec))  # DeepSpeed's buffers reference the logits
            self._free(in_flight)
            if not self.chunk.has_head:  # otherwise the graph of the logits references the input and its gradient
                sent = self.keeps_passed_on and not self.chunk.has_embedding
                # Schedule1F1B's variable `fwd_sends` references the activation that was sent last.
                variable = keeps_sent(self.spec) and self.spec.parallelism.schedule == "1f1b"
                self.requests.drop([*([] if variable else passed_on), *([walk.input_gradient] if sent else [])])
            walk.engine.reduce_gradients()
        walk.engine.after_last_backward(gradients)
        self.requests.drop(kept)
        return RecordedStream(SizelessStream(self.requests), tuple(self.blocks), of_frozen, takes_over=takes_over)

    def evaluation(self) -> RecordedStream:
        """Record forward and loss of a batch outside autograd, between steps."""
        self.requests.begin(EXISTING)
        self.requests.begin(EVALUATION)
        run = evaluated(self.spec)
        walk, _ = self._walk(run, exist=False, gradients=False)
        walk.engine.resume()
        walk.engine.begin(have_gradients=False, last=True)
        self._forward_alone(walk)
        of_frozen, kept = self._scores(run, walk.engine) if self.chunk.has_head else (range(0), [])
        self.requests.drop(kept)
        walk.release()
        walk.engine.after_evaluation()
        return RecordedStream(SizelessStream(self.requests), tuple(self.blocks), of_frozen, takes_over=False)

    def _taught(self, teacher: FrozenModel, student: ForwardBackward) -> range:
        """Record the teacher's forward, then the loss, which reads its logits; return its blocks."""
        first = len(self.blocks)
        walk, _ = self._walk(teacher.run, exist=False, gradients=False, model=FROZEN, chunk=teacher.chunk)
        walk.engine.resume()
        walk.engine.begin(have_gradients=False, last=True)
        walk.forward(self._received(walk))
        student.loss()
        walk.release()
        walk.engine.after_evaluation()
        return range(first, len(self.blocks))

    def _scores(self, spec: Spec, policy: Engine) -> tuple[range, list[int]]:
        """Record the forward and the loss of a reference, if it scores the batch.

        Args:
            spec: the run.
            policy: the engine of the policy.

        Returns:
            Its blocks, and the storages of logits that stay referenced.
        """
        first, kept = len(self.blocks), list[int]()
        if scored_by_reference(spec):
            run = reference_run(spec)
            walk, _ = self._walk(run, exist=False, gradients=False, model=FROZEN, policy=policy)
            if walk.engine is not policy:
                walk.engine.resume()
            walk.engine.begin_scoring()
            self._forward_alone(walk)
            kept = walk.release(keeps_output=run.training.logits_until == "step")
            walk.engine.after_scoring()
        return range(first, len(self.blocks)), kept

    def _walk(
        self,
        spec: Spec,
        *,
        exist: bool,
        gradients: bool = True,
        model: str = POLICY,
        chunk: Stage | None = None,
        policy: Engine | None = None,
    ) -> tuple[ForwardBackward, list[int]]:
        """Return the simulation of a micro-batch, and existing gradients that its engine takes over.

        Args:
            spec: the run.
            exist: whether gradients of earlier micro-batches exist.
            gradients: whether autograd is on.
            model: the model of the layers.
            chunk: the chunk of the model; None: that of the recording.
            policy: the engine of the policy, for a reference.
        """
        chunk = self.chunk if chunk is None else chunk
        options, plan = state_options(spec), plan_of(spec, chunk)
        layers = Layers(spec, chunk, model)
        units = by_unit(layers.ordered, layers.numbers, options.fsdp)
        if options.engine == "megatron":
            engine = Engine(self.requests)  # the buffers of Megatron-Core's modules are rows of their own
        elif model == FROZEN:
            engine = reference_engine_of(self.requests, layers.of_engine, units, spec, plan, policy)
        else:
            engine = engine_of(self.requests, layers.of_engine, units, spec, plan, self.rank)
        engine.rounds = {layer: loop.rounds for loop in layers.played for item in loop.items for layer in leaves(item)}
        existing = engine.existing() if exist else []
        arriving = arriving_gradients(spec, engine, exist=exist)
        parts = StageBlocks(
            spec,
            chunk,
            UnitSizer(),
            arriving,
            plan,
            blocks=self.blocks,
            without_gradients=not gradients,
            without_adapters=model == FROZEN and scores_itself(spec),
        )
        threads = set(THREADS[:1] if self.workspace else THREADS)
        given = (self.requests, parts, layers.played, engine, gradient_names(spec, units), 1, threads)
        return ForwardBackward(*given, splits_workspaces=False), existing

    def _forward_alone(self, walk: ForwardBackward) -> None:
        """Record a forward pass and its loss outside autograd."""
        walk.forward(self._received(walk))
        if self.chunk.has_head:
            walk.loss()
        else:
            self.requests.drop([walk.output])

    def _received(self, walk: ForwardBackward) -> int:
        """Allocate the input of a stage without embedding; return its storage."""
        if self.chunk.has_embedding:
            return -1
        number, entry = walk.parts.entry
        return self.requests.take(1, 0, walk.steps.labels(number)[entry])

    def _hold_in_flight(self, walk: ForwardBackward) -> Iterator[HeldInLoop]:
        """Record the live tensors of other micro-batches in flight, in a loop over these micro-batches; yield them."""
        for number, storages, field in walk.parts.in_flight_ends():
            yield self._hold(walk, number, storages, NamedRounds(1, field))
        for index, loop in enumerate(walk.loops):
            for item in loop.items:
                number = walk.parts.block_of(next(leaves(item)), again=not isinstance(item, int))
                rounds = NamedRounds(1, ("layers in flight", index))
                yield self._hold(walk, number, self.blocks[number].program.kept, rounds)
        for number, storage in self._passed_on(walk):
            yield self._hold(walk, number, (storage,), NamedRounds(1, "in_flight"))

    def _passed_on(self, walk: ForwardBackward) -> Iterator[tuple[int, int]]:
        """Yield the block and the storage of what the stage has received and sent, if it keeps them."""
        if self.keeps_passed_on and not self.chunk.has_embedding:
            yield walk.parts.entry
        if (self.keeps_passed_on or keeps_sent(self.spec)) and not self.chunk.has_head and walk.plan:
            last = walk.plan[-1]
            number = walk.parts.block_of([*leaves(last)][-1], again=not isinstance(last, int))
            yield number, self.blocks[number].program.output

    def _hold(self, walk: ForwardBackward, number: int, storages: Sequence[int], rounds: NamedRounds) -> HeldInLoop:
        with self.requests.repeat(rounds):
            return HeldInLoop(rounds, [self.requests.take(1, 0, walk.steps.labels(number)[at]) for at in storages])

    def _free(self, held: Sequence[HeldInLoop]) -> None:
        for rounds, storages in held:
            with self.requests.repeat(rounds):
                self.requests.drop(storages)

    def _received_gradient(self, walk: ForwardBackward) -> int:
        """Allocate the gradient of a stage's output where it is referenced until backward has ended.

        Source: Megatron-LM core_r0.14 core/pipeline_parallel/schedules.py, backward_step(output_tensor_grad); DeepSpeed
        0.19 runtime/pipe/engine.py, _exec_recv_grads; torch 2.13 distributed/pipelining/stage.py, grad_recv_info.
        """
        others = self.spec.training.implementation == "megatron" or self.spec.parallelism.has_pipeline_engine
        refers = others or uses_pipelining(self.spec)
        if self.chunk.has_head or not refers:
            return -1
        number = walk.layers[self.chunk.stop - 1].number
        start = self.blocks[number].program.backward[0].storage
        storage = self.requests.take(1, 0, walk.steps.labels(number)[start])
        self.requests.hold(storage)
        return storage


class RecordedStream(NamedTuple):
    """A recorded step or evaluation, of any sizes.

    Args:
        stream: its requests.
        blocks: the blocks that its labels name.
        of_frozen: the blocks of a reference model's or a teacher's forward pass.
        takes_over: whether an engine takes over gradients that exist before the step.
    """

    stream: SizelessStream
    blocks: tuple[SizedBlock, ...]
    of_frozen: range
    takes_over: bool
