"""Requests of a whole run, in order, for an allocator replay.

The formulas know the requested bytes. Unsplit remainders of up to 1 MiB and reserved memory depend on which blocks are
free at each request. So the steps are replayed from the first weight on, with the programs that the formulas use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from itertools import cycle, islice
from math import ceil

from memcalc.errors import OutOfMemory
from memcalc.layout.local_parameters import LocalParameter, stage_parameters
from memcalc.layout.parameters import layer_prefixes
from memcalc.layout.schedules import logits_released
from memcalc.layout.sequence_sharding import has_ring_attention
from memcalc.layout.stages import Stage, stages_of
from memcalc.layout.teacher import teacher_run, teacher_stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import BIT, EVALUATION, GENERATION, PHASES, STEPS
from memcalc.programs.sized_program import ProgramSizer, run_sizer
from memcalc.sharding.deepspeed import lacks
from memcalc.sharding.engine import Engine, by_unit
from memcalc.sharding.engines import arriving_gradients, engine_of, gradient_names, reference_engine_of
from memcalc.sharding.megatron import lacks as megatron_lacks
from memcalc.sharding.schedules import lacks as pipeline_lacks
from memcalc.simulation.backward_updates import UpdatesInBackward
from memcalc.simulation.batch_lengths import BatchLength, length_of, orders_of, with_length
from memcalc.simulation.construction.initial_tensors import InitialTensor, InitialTensors
from memcalc.simulation.construction.model import built_before_training
from memcalc.simulation.evaluation import evaluated, reference_run
from memcalc.simulation.forward_backward import ForwardBackward
from memcalc.simulation.generation import GenerationRequests, unsupported_generation_reason
from memcalc.simulation.layer_loops import LayerLoop
from memcalc.simulation.micro_batch import MicroBatch
from memcalc.simulation.optimizer_step import OptimizerStep
from memcalc.simulation.plans import plan_of
from memcalc.simulation.stage_blocks import StageBlocks
from memcalc.spec.recompute_plan import items_of
from memcalc.spec.scoring import scored_by_reference, scores_itself
from memcalc.spec.spec import Spec
from memcalc.spec.towers import tower_trains
from memcalc.spec.training import TOKENWISE
from memcalc.states.gradient_policy import embedding_gradient_stays, gradient_policy
from memcalc.states.optimizers.optimizer_states import replaces_states
from memcalc.states.optimizers.parameter_order import in_order
from memcalc.states.persistent import logits_of_the_step_before, returns_loss, workspace
from memcalc.states.state_options import StateOptions, groups, state_options
from memcalc.stream.requests import Beginning, DelayedRequests, RecordedRequests, Replay, Requests, replay

STEADY = tuple(phase for phase in PHASES if phase.endswith(f"_{STEPS}"))
# Of a step's micro-batches the first creates gradients, the second adds to them, and the third finds the same free
# blocks as all later ones.
MICRO_BATCHES = 3
# Of steps that do not empty the cache the first finds other free blocks than all later ones.
EMPTYING_CYCLE = 2
COMPARED_ALONE = ("adam-4bit",)  # compared with recorded runs of one GPU only


def run_requests(
    spec: Spec, stage: Stage | None = None, rank: int | None = None, lengths: tuple[BatchLength, ...] = ()
) -> Requests:
    """Return the requests of three steps or of a generation, in order, which callers must not change.

    `unsupported_reason(spec)` must be empty.

    Args:
        spec: the run.
        stage: of its ranks the ones of this pipeline stage; None: the first.
        rank: the rank, as in `ranks_to_replay`; None: the one that holds most.
        lengths: sequence length of each micro-batch, one of `batch_lengths.orders_of(spec)`; empty: all are of the
            same length. There are as many steps as these need, but at least three.
    """
    return _recorded(spec, stage or stages_of(spec)[0], rank, lengths)


@lru_cache(maxsize=1)
def replayed_requests(
    spec: Spec, stage: Stage | None = None, rank: int | None = None, lengths: tuple[BatchLength, ...] = ()
) -> Requests:
    """Return the requests of `run_requests` for a replay: labels and a few last frees may be those of more steps.

    A run that is replayed in several orders of lengths shares recordings, and so do its batches of one length.
    """
    if not lengths and orders_of(spec):
        from memcalc.simulation.length_recordings import can_share, length_recordings  # they record a SimulatedRun

        if can_share(spec):
            return length_recordings(spec, rank).of_one_length()
    return run_requests(spec, stage, rank, lengths)


def delayed_requests(spec: Spec, rank: int | None = None, lengths: tuple[BatchLength, ...] = ()) -> Requests:
    """Return the requests of `run_requests` on a GPU that is as late as possible.

    The host waits for it once a step, and where the engine does. Call it only if `waits_for_streams(spec)`.
    """
    return SimulatedRun(spec, DelayedRequests(), rank=rank, lengths=lengths).play()


@lru_cache(maxsize=1)  # a run's timeline uses the requests of its verdict
def _recorded(spec: Spec, stage: Stage, rank: int | None, lengths: tuple[BatchLength, ...]) -> Requests:
    if spec.inference is not None:
        return GenerationRequests(spec, Requests()).record()
    if spec.parallelism.has_pipeline_engine:
        from memcalc.simulation.deepspeed_pipeline import DeepSpeedPipeline  # it extends SimulatedRun

        return DeepSpeedPipeline(spec, Requests(), stage, rank).play()
    if spec.parallelism.pipeline_parallel == 1:
        from memcalc.simulation.length_recordings import can_share, length_recordings  # they record a SimulatedRun

        if lengths and can_share(spec):
            return length_recordings(spec, rank).requests(lengths)
        return SimulatedRun(spec, Requests(), rank=rank, lengths=lengths).play()
    if state_options(spec).engine == "megatron":
        from memcalc.simulation.megatron_pipeline import MegatronPipeline  # it extends SimulatedRun

        return MegatronPipeline(spec, Requests(), stage, rank).play()
    from memcalc.simulation.pipeline import SimulatedPipeline  # as above

    return SimulatedPipeline(spec, Requests(), stage).play()


def simulate(spec: Spec, stage: Stage | None = None, rank: int | None = None) -> Replay:
    """Replay three steps of a run, or a whole generation; `unsupported_reason(spec)` must be empty.

    The replay is limited to the GPU's memory, where the allocator frees cached blocks before it fails. A run that does
    not fit, or has no GPU, is replayed without a limit.

    Args:
        spec: the run.
        stage: the pipeline stage; None: the first one.
        rank: the rank, as in `ranks_to_replay`; None: the one that holds most.

    Raises:
        InputError: the PyTorch version does not accept these settings.
    """
    torch, settings = spec.training.torch_version.removeprefix("v"), spec.training.alloc_conf
    requests = run_requests(spec, stage, rank)
    gpu = spec.gpu
    if gpu is None:
        return replay(requests, settings, torch)
    try:
        return replay(requests, settings, torch, gpu.usable_bytes - gpu.context_bytes, gpu.usable_bytes)
    except OutOfMemory:
        return replay(requests, settings, torch, capacity=gpu.usable_bytes)


def further_steps(spec: Spec) -> int:
    """Return the number of steps after the first ones in which batches of one length may find other free blocks."""
    return 1 if spec.training.empty_cache_steps is None else EMPTYING_CYCLE


def repeated_steps(spec: Spec, lengths: tuple[BatchLength, ...], steps: Sequence[Beginning]) -> list[Beginning]:
    """Return the last of a run's steady steps, and the one before it with batches of the same lengths; empty: none is.

    Args:
        spec: the run.
        lengths: sequence length of each micro-batch, in turn; empty: all are of the same length.
        steps: the beginnings of all steps but the first.
    """
    each = min(spec.training.gradient_accumulation_steps, MICRO_BATCHES)
    numbers = range(STEPS - 1, STEPS - 1 + len(steps))
    of_steps = [[*islice(cycle(lengths), number * each, (number + 1) * each)] for number in numbers]
    alike = [step for step, its in zip(steps, of_steps, strict=True) if its == of_steps[-1]]
    return alike[-2:] if len(alike) > 1 and spec.training.empty_cache_steps is None else []


class Teacher:
    """The teacher of a simulated run."""

    def __init__(self, spec: Spec, requests: Requests) -> None:
        self.run, self.stage = teacher_run(spec), teacher_stage(spec)
        options = state_options(self.run)
        prefixes = layer_prefixes(self.run.model, self.stage.numbers)
        ordered = tuple(in_order(stage_parameters(self.run, self.stage), options.update.family, prefixes))
        units = by_unit(ordered, self.stage.numbers, options.fsdp)
        plan = items_of((), self.run.model.num_layers)
        self.engine = reference_engine_of(requests, ordered, units, self.run, plan)
        self.parameters = gradient_names(self.run, units)
        self.batches: dict[BatchLength, MicroBatch] = {}


class SimulatedRun:
    """Recorder of a run's requests, phase by phase.

    Args:
        spec: the run.
        requests: where they are recorded.
        stage: the pipeline stage; None: the first.
        rank: the rank, as in `ranks_to_replay`; None: the one that holds most.
        lengths: sequence length of each micro-batch; empty: all are of the same length.
        sizer_of: function that returns the sizer of a run's blocks; None: the run's own sizes.
    """

    passing_type = ForwardBackward

    def __init__(
        self,
        spec: Spec,
        requests: Requests,
        stage: Stage | None = None,
        rank: int | None = None,
        lengths: tuple[BatchLength, ...] = (),
        sizer_of: Callable[[Spec], ProgramSizer] | None = None,
    ) -> None:
        self.spec, self.stage, self.choice = spec, stage or stages_of(spec)[0], state_options(spec)
        self.rank_in_ring = rank if has_ring_attention(spec) else None
        self.lengths, self.next_lengths = lengths, cycle(lengths or (length_of(spec),))
        self.card = spec.gpu
        self.sizer_of = sizer_of or partial(run_sizer, gpu=self.card, rank_in_ring=self.rank_in_ring)
        self.workspace = workspace("forward", spec, self.card, 0)
        parameters = stage_parameters(spec, self.stage)
        parts = groups(parameters, self.choice)
        self.built = [*built_before_training(spec, self.stage, self.choice)]
        self.requests = requests
        prefixes = layer_prefixes(spec.model, self.stage.numbers)
        self.ordered = tuple(in_order(parameters, self.choice.update.family, prefixes))
        self.units = by_unit(self.ordered, self.stage.numbers, self.choice.fsdp)
        self.engine: Engine = (
            UpdatesInBackward(requests, self.ordered)
            if self.choice.step.updates_in_backward
            else engine_of(requests, self.ordered, self.units, spec, plan_of(spec), rank)
        )
        self.parameters = gradient_names(spec, self.units)
        trained = [(parameters, own) for parameters, own, trains in parts if trains]
        self.step = OptimizerStep(requests, self.engine.updated(trained), prefixes, self.engine, self.ordered)
        self.repeats = requests.repeats and self.engine.repeats
        self.step_repeats = self.repeats and not replaces_states(self.choice.update)
        self.threads: set[str] = set()  # threads with a cuBLAS workspace
        self.alive: dict[int, list[int]] = {}  # index in `built` -> live storages
        self.groups: dict[Hashable, list[int]] = {}  # storages that tensors made later free
        self.weights: dict[LocalParameter, deque[int]] = {}  # storages of parameters: one of a layer for each layer
        self.gradients: list[int] = []
        self.keeps_output = logits_released(spec) == "step" and bool(logits_of_the_step_before(spec, self.stage))
        self.named: list[int] = []  # output of the previous micro-batch, which a variable still references
        self.stale: list[int] = []  # gradients of the previous step
        self.remaining: list[int] = []  # the embedding's gradient, if zero_grad does not free it
        self.passing: MicroBatch | None = None  # the current micro-batch
        self.beginnings: list[Beginning] = []  # of micro-batches
        self.length = length_of(spec)  # its length
        self.reference_engine: Engine | None = None  # of a model that scores each micro-batch of the policy
        # The reference's batches by sequence length and number of samples.
        self.references: dict[tuple[int, int], MicroBatch] = {}
        self.scored: list[int] = []  # output of the reference, if a variable still references it
        self.teacher = None if spec.training.teacher is None else Teacher(spec, requests)
        # The micro-batches by whether gradients exist before them, and by length.
        self.kinds: dict[tuple[bool, BatchLength], MicroBatch] = {}
        self.steady_step: RecordedRequests | None = None  # the optimizer step, for all steps but the first
        self.steady_gradients: list[int] = []  # the gradients it was recorded with
        self.steps = 0  # completed
        self.steady_steps: list[Beginning] = []
        self.steady_ends: list[int] = []  # the number of intervals up to the end of each steady step

    def play(self) -> Requests:
        """Record all phases."""
        training = self.spec.training
        asked = (self._evaluates("between"), training.completion_length is not None)
        between = tuple(phase for phase, is_asked in zip((EVALUATION, GENERATION), asked, strict=True) if is_asked)
        played = (*PHASES, *between, *STEADY * self._more_steps)  # the placement of blocks settles in the second step
        for phase, following in zip(played, (*played[1:], ""), strict=True):
            # The gradients of the step before are freed.
            if phase == f"forward_{STEPS}":
                self.steady_steps.append(self.requests.next_beginning())
            self.requests.begin(phase)
            if phase == f"zero_grad_{STEPS}" and self.steady_steps:
                self.steady_ends.append(len(self.requests.stretches) - 1)
            if phase.startswith("zero_grad"):  # programs that read the loss wait at least once a step
                self.requests.wait()
            if phase == "optimizer":
                trained = (self.weights.get(parameter) for parameter in self.ordered if parameter.trains)
                self.engine.wrap([storages.popleft() for storages in trained if storages])
            for index, each in enumerate(self.built):
                if each.mask & BIT[phase] and index not in self.alive:
                    self.alive[index] = self._make(each)
            self._run(phase)
            for index in [index for index in self.alive if following and not self.built[index].mask & BIT[following]]:
                self.requests.drop(self.alive.pop(index))
        self.steady_ends.append(len(self.requests.stretches))
        self.requests.steady = repeated_steps(self.spec, self.lengths, self.steady_steps)
        return self.requests

    @property
    def _more_steps(self) -> int:
        """The number of steps after the first ones: one, or as many as the lengths and emptied caches need."""
        each = min(self.spec.training.gradient_accumulation_steps, MICRO_BATCHES)
        return max(ceil(len(self.lengths) / each) - STEPS, further_steps(self.spec))

    def _make(self, built: InitialTensors) -> list[int]:
        found: list[int] = []
        replaced = [*map(self._construct, built.replaced)]
        for index, made in enumerate(built.tensors):
            found.append(self._construct(made))
            if not made.stays:
                self.requests.drop((found.pop(),))
            if made.parameter is not None and made.stays:
                self.weights.setdefault(made.parameter, deque()).append(found[-1])
            self.requests.drop(replaced[index : index + 1])
            if built.groups:
                self.groups.setdefault(built.groups[index], []).append(found.pop())
        self.requests.drop(self.groups.pop(built.frees, ()))
        if built.empties_cache:
            self.requests.empty_cache()
        return found

    def _construct(self, made: InitialTensor) -> int:
        """Allocate a tensor, free what its construction needed, and return its storage."""
        before = [self.requests.play(made.before, Component.TEMPORARIES)] if made.before else []
        if made.several:
            storage = self.requests.play(made.several, made.component)
        else:
            storage = self.requests.take(made.size, 0, made.component)
        if before:
            self.requests.drop(before)
        return storage

    def _run(self, phase: str) -> None:
        kind, _, number = phase.rpartition("_") if phase[-1].isdigit() else (phase, "", "")
        if kind == "optimizer":
            self.step.build()
        elif kind == "optimizer_step":
            self._step(first=phase == "optimizer_step_1")
        elif phase == "zero_grad_1":
            self._precede_first_step(phase)
        elif kind == "zero_grad" and not self.choice.step.zeroes_gradients:
            self._zero_gradients()
        elif kind == EVALUATION:
            self._evaluate()
        elif kind == GENERATION:
            self._generate()
        elif kind == "forward":
            for _ in range(min(self.spec.training.gradient_accumulation_steps, MICRO_BATCHES) - 1):
                self._pass(number)
            self._forward()
        elif kind == "loss":
            self._loss()
        elif kind == "backward":
            self._backward()

    def _zero_gradients(self) -> None:
        """Free the gradients of the step before, now or before the next backward."""
        if embedding_gradient_stays(self.spec) and not self.remaining:  # the last gradient of a backward
            self.remaining, self.gradients = self.gradients[-1:], self.gradients[:-1]
        self.stale, self.gradients = self.gradients, []
        if not self.choice.step.zeroes_gradients_before_backward:
            self._drop_stale()

    def _precede_first_step(self, phase: str) -> None:
        """Record what runs without gradients before the first step, an evaluation and completions; then go on."""
        generates = self.spec.training.completion_length is not None
        asked = ((EVALUATION, self._evaluates("before"), self._evaluate), (GENERATION, generates, self._generate))
        for other, is_asked, record in asked:
            if is_asked:
                self.requests.begin(other)
                record()
                self.requests.begin(phase)

    def _pass(self, number: str) -> None:
        """Record a micro-batch other than the last of its step."""
        self.requests.begin(f"forward_{number}")
        self._forward(last=False)
        self.requests.begin(f"loss_{number}")
        self._loss()
        self.requests.begin(f"backward_{number}")
        self._backward(last=False)
        self.requests.begin(f"forward_{number}")

    def _forward(self, *, last: bool = True) -> None:
        self.engine.prepare()
        self.engine.begin(have_gradients=bool(self.gradients), last=last)
        exist = bool(self.gradients) or self.engine.has_unsharded_gradients
        self.beginnings.append(self.requests.beginning())
        self.length = next(self.next_lengths)
        key = exist, self.length
        if key not in self.kinds or not self.repeats:
            run = with_length(self.spec, self.length)
            plan = plan_of(run)
            arriving = arriving_gradients(run, self.engine, exist=exist)
            parts = StageBlocks(run, self.stage, self.sizer_of(run), arriving, plan)
            known = self.kinds.get(key)
            passing = (
                known.passing
                if known is not None and self.requests.repeats
                else self.passing_type(
                    self.requests,
                    parts,
                    (LayerLoop(plan),),
                    self.engine,
                    self.parameters,
                    self.workspace.each,
                    self.threads,
                )
            )
            self.kinds[key] = MicroBatch(self.requests, passing)
        self.passing = self.kinds[key]
        self.passing.forward()
        if not returns_loss(self.spec):
            self._forget_output()

    def _evaluates(self, when: str) -> bool:
        training = self.spec.training
        return training.evaluation_batch_size is not None and training.evaluation_when in (when, "both")

    def _evaluate(self) -> None:
        """Record two batches without gradients, after the step's gradients are freed; later ones repeat the second."""
        if not self.choice.step.zeroes_gradients:
            self.requests.drop(self.gradients)
            self.gradients = []
        run = evaluated(self.spec)
        batch = self._without_gradients(run, self.engine)
        for _ in range(2):
            if not self.engine.keeps_gradients:  # the first batch leaves units unsharded
                batch = MicroBatch(self.requests, batch.passing)
            self.engine.begin_evaluation()
            batch.forward()
            batch.loss()
            if scored_by_reference(run):
                self._score(run)
            batch.release()
        self.engine.after_evaluation()
        if self.engine.order_is_stale:  # the next backward has other requests
            self.kinds = {}

    def _without_gradients(
        self, run: Spec, engine: Engine, teacher: Teacher | None = None, *, without_adapters: bool = False
    ) -> MicroBatch:
        """Return a micro-batch with a forward outside autograd, of the model that trains or of its teacher."""
        arriving = gradient_policy(run, exist=False, sharded=False)
        plan = items_of((), run.model.num_layers)
        stage, parameters = (self.stage, self.parameters) if teacher is None else (teacher.stage, teacher.parameters)
        sizer = run_sizer(run, self.card, self.rank_in_ring)
        parts = StageBlocks(
            run, stage, sizer, arriving, plan, without_gradients=True, without_adapters=without_adapters
        )
        passing = self.passing_type(
            self.requests, parts, (LayerLoop(plan),), engine, parameters, self.workspace.each, self.threads
        )
        return MicroBatch(self.requests, passing)

    def _teach(self, teacher: Teacher) -> MicroBatch:
        """Record the teacher's forward pass on the current micro-batch; its logits are live until the loss is known."""
        engine, known = teacher.engine, teacher.batches
        if self.length not in known or not self.requests.repeats:
            known[self.length] = self._without_gradients(with_length(teacher.run, self.length), engine, teacher)
        elif not engine.repeats:
            known[self.length] = MicroBatch(self.requests, known[self.length].passing)
        engine.begin_evaluation()
        known[self.length].forward()
        return known[self.length]

    def _score(self, spec: Spec) -> None:
        """Record the forward pass and the loss of a reference on the current batch of a run."""
        run = reference_run(spec)
        if self.reference_engine is None:
            plan = items_of((), run.model.num_layers)
            self.reference_engine = reference_engine_of(self.requests, self.ordered, self.units, run, plan, self.engine)
        engine = self.reference_engine
        key = run.training.sequence_length, run.training.micro_batch_size
        if key not in self.references or not self.requests.repeats:
            self.references[key] = self._without_gradients(run, engine, without_adapters=scores_itself(run))
        elif not engine.repeats:
            self.references[key] = MicroBatch(self.requests, self.references[key].passing)
        batch = self.references[key]
        engine.begin_scoring()
        batch.forward()
        batch.loss()
        self.requests.drop(self.scored)
        self.scored = batch.release(keeps_output=run.training.logits_until == "step")
        engine.after_scoring()

    def _generate(self) -> None:
        """Record the completions of a step, after the gradients of the step before are freed."""
        from memcalc.simulation.rollout import rollout_of

        if not self.choice.step.zeroes_gradients:
            self.requests.drop(self.gradients)
            self.gradients = []
        if "forward" not in self.threads:
            self.threads.add("forward")
            self.requests.take(self.workspace.each, 0, self.workspace.component)
        rollout = rollout_of(self.spec)
        self.requests.insert(rollout.requests, rollout.labels)

    def _loss(self) -> None:
        assert self.passing is not None
        if self.teacher is None:
            self.passing.loss()
        else:
            taught = self._teach(self.teacher)
            self.passing.loss()
            taught.release()
            self.teacher.engine.after_scoring()
        if scored_by_reference(self.spec):
            self._score(with_length(self.spec, self.length))
            self.passing.end_scoring()
        self._forget_output()

    def _forget_output(self) -> None:
        """Free the output of the previous micro-batch, because its variable now references the current one."""
        self.requests.drop(self.named)
        self.named = []

    def _drop_stale(self) -> None:
        self.requests.drop(self.stale)
        self.stale = []

    def _backward(self, *, last: bool = True) -> None:
        assert self.passing is not None
        self._empty_cache("before-backward")
        self._drop_stale()
        arrived = self.passing.backward()
        if self.remaining and arrived:  # added to it
            self.requests.drop(arrived[-1:])
            arrived = arrived[:-1]
        self.gradients += arrived
        if last:
            self.gradients = self.engine.after_last_backward(self.gradients)
        self.named = self.passing.release(keeps_output=self.keeps_output)
        self._empty_cache("after-backward")

    def _empty_cache(self, when: str) -> None:
        """Free cached blocks, if the program does so now (transformers 5.23 trainer.py, training_step)."""
        every, asked = self.spec.training.empty_cache_steps, self.spec.training.empty_cache_when
        if every is not None and when == asked and self.steps % min(every, EMPTYING_CYCLE) == 0:
            self.requests.empty_cache()

    def _step(self, *, first: bool) -> None:
        given = self.gradients if self.engine.frees_gradients else []
        if self.steady_step is not None and self.step_repeats:
            self.requests.again(self.steady_step, dict(zip(self.steady_gradients, given, strict=True)))
        else:
            mark = self.requests.mark()
            self.engine.before_step(given)
            self.step.run(first=first)
            self.engine.after_step()
            self.steady_step, self.steady_gradients = None if first else self.requests.since(mark), given
        if given:
            self.gradients = []
        self.steps += 1


def unsupported_reason(spec: Spec) -> str:
    """Return why the order of the run's allocations is not modelled; "" if it is."""
    if spec.inference is not None:
        return unsupported_generation_reason(spec)
    options = state_options(spec)
    reasons = {
        "a teacher under DeepSpeed": options.engine == "deepspeed" and spec.training.teacher is not None,
        "a vision tower that trains": tower_trains(spec.model, spec.training),
        **dict.fromkeys(megatron_lacks(spec, plan_of(spec)) if options.engine == "megatron" else (), True),
        "weights alone in host memory under DeepSpeed": options.engine == "deepspeed"
        and options.host.has_weights
        and not options.host.offloads,
        f"optimizer {options.update.optimizer} on several GPUs": options.update.optimizer in COMPARED_ALONE
        and spec.parallelism.ranks > 1,
        **_reasons_of_ranks(spec, options),
    }
    return next((f"the order of requests is not known with {reason}" for reason, is_so in reasons.items() if is_so), "")


def _reasons_of_ranks(spec: Spec, options: StateOptions) -> dict[str, bool]:
    """Return the properties of a multi-rank run that prevent its replay."""
    parallelism, training = spec.parallelism, spec.training
    if options.engine == "megatron":
        return {}  # see `megatron_lacks`
    alone = options.data_parallel == 1
    if parallelism.ranks == 1:
        reasons = lacks(spec, plan_of(spec)) if options.engine == "deepspeed" else ()
        sharded = parallelism.zero_stage > 0 and options.engine != "deepspeed"
        return {"a sharding engine on one rank": sharded, **dict.fromkeys(reasons, True)}
    fsdp = parallelism.engine in ("fsdp1", "fsdp2") and parallelism.zero_stage > 0
    its_name = parallelism.engine.upper()
    deepspeed = parallelism.engine == "deepspeed"
    return {
        **dict.fromkeys(pipeline_lacks(spec) if parallelism.pipeline_parallel > 1 and not deepspeed else (), True),
        "an emptied cache in a pipeline": parallelism.pipeline_parallel > 1 and training.empty_cache_steps is not None,
        "context parallelism by an all-to-all": parallelism.context_parallel > 1 and not has_ring_attention(spec),
        "expert parallelism": parallelism.expert_parallel > 1
        and (not options.fsdp.expert_units or parallelism.pipeline_parallel > 1),
        "a sharding engine on one rank": alone and parallelism.zero_stage > 0 and not deepspeed,
        **dict.fromkeys(lacks(spec, plan_of(spec)) if deepspeed else (), True),
        f"layers in one checkpoint segment under {its_name}": fsdp
        and not all(isinstance(item, int) or len(item) == 1 for item in plan_of(spec)),
        f"a loss outside of the model that reads the LM head's weight under {its_name}": fsdp
        and training.loss in TOKENWISE
        and training.loss_recompute
        and not options.model.loss_in_model,
    }
