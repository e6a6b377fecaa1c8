"""The micro-batches of a pipeline stage that may hold most, and what the stage holds besides its states while they run.

In a steady step that is the last micro-batch in flight: the most are in flight, and all gradients exist. With few
micro-batches the first backward has the most in flight, but meets no gradients, and later ones meet more gradients with
fewer in flight. Several chunks get their gradients in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import ge
from typing import Literal, NamedTuple

from memcalc.layout.schedules import uses_pipelining
from memcalc.layout.stages import Stage, composition, is_steady
from memcalc.ledger.row_drafts import RowDraft
from memcalc.programs.sized_program import ProgramSizer
from memcalc.sharding.schedules import actions_in, counted_micro_batches
from memcalc.simulation.kept_activations import kept_activations
from memcalc.simulation.passes import pieces_of
from memcalc.spec.spec import Spec
from memcalc.spec.zero import FULLY_SHARDED
from memcalc.states.communication_buffers import bucket_between_passes
from memcalc.states.model_states import earlier_gradients, reduced_gradients
from memcalc.states.pipeline_engine import kept_in_flight
from memcalc.states.pipelining import gathered_stage, gathers_stages, in_passes, lists_sent, received_tensors
from memcalc.states.state_options import state_options

NONE, PART, WHOLE = range(3)  # of a chunk's parameters or gradients


class ChunkState(NamedTuple):
    """What a chunk holds before a backward of its stage.

    Args:
        gradients: of earlier micro-batches that the states of the stage do not count: PART of them if FSDP2 has reduced
            them after the chunk's last backward.
        parameters: those that FSDP2 has gathered: PART of them if a forward has resharded the layers since.
        in_flight: its micro-batches, if its layers differ from those of the chunk that runs.
    """

    gradients: int = NONE
    parameters: int = NONE
    in_flight: int = 0


class Passed(NamedTuple):
    """Tensors that a stage exchanges with others, as `pipelining.in_passes` counts them."""

    received: int = 0
    sent: int = 0


class Moment(NamedTuple):
    """The backward of a micro-batch on a chunk, and the forward before it.

    Args:
        chunk: the chunk, with the micro-batches in flight before the backward.
        states: of each chunk of the stage.
        is_made: whether the chunk itself has gradients of earlier micro-batches that the states do not count.
        after_forward: whether a forward of the chunk ran since its last backward.
        passed: what the stage has received and sent.
    """

    chunk: Stage
    states: tuple[ChunkState, ...]
    is_made: bool = False
    after_forward: bool = True
    passed: Passed = Passed()

    @property
    def amounts(self) -> tuple[int, ...]:
        """What it holds of everything; a moment of the same chunk that holds no more cannot be the peak."""
        chunk = self.chunk
        amounts = chunk.in_flight, chunk.embeddings, chunk.heads, self.is_made
        return (*amounts, *self.passed, *chain.from_iterable(self.states))

    def parts(self, spec: Spec) -> Iterator[Part]:
        """Yield what the stage holds besides its states while the micro-batch runs."""
        if uses_pipelining(spec):
            yield Part("received", copies=self.passed.received)
            yield Part("sent", copies=self.passed.sent)
        if spec.parallelism.has_pipeline_engine:
            yield Part("pipeline buffers", number=self.chunk.in_flight)
        if any(state.gradients for state in self.states):
            yield Part("bucket")
        for chunk, state in enumerate(self.states):
            if state.in_flight:
                yield Part("activations", chunk, copies=state.in_flight)
            if state.gradients:
                yield Part("gradients", chunk, state.gradients)
            if state.parameters:
                yield Part("parameters", chunk, state.parameters)

    def rows(self, spec: Spec, stage: Stage, sizer: ProgramSizer) -> tuple[RowDraft, ...]:
        """Return what the stage holds besides its states while the micro-batch runs."""
        return BesideStates(spec, stage, sizer).rows(self)


class Part(NamedTuple):
    """Tensors that a stage holds besides its states, alike at all of its moments.

    Args:
        kind: what they are.
        chunk: number of the chunk that they belong to.
        number: PART or WHOLE of a chunk's tensors; of pipeline buffers the micro-batches in flight.
        copies: how often it holds them.
    """

    kind: Literal["received", "sent", "pipeline buffers", "bucket", "activations", "gradients", "parameters"]
    chunk: int = 0
    number: int = NONE
    copies: int = 1

    def rows(self, spec: Spec, stage: Stage, sizer: ProgramSizer) -> Iterable[RowDraft]:
        """Return the rows of one copy."""
        kind, chunk = self.kind, stage.chunks[self.chunk]
        if kind in ("received", "sent"):
            return in_passes(spec, received=int(kind == "received"), sent=int(kind == "sent"))
        if kind == "pipeline buffers":
            return kept_in_flight(spec, stage, self.number)
        if kind == "bucket":
            return bucket_between_passes(state_options(spec))
        if kind == "activations":
            return kept_activations(spec, chunk, sizer)
        if kind == "gradients":
            return (earlier_gradients if self.number == WHOLE else reduced_gradients)(spec, chunk)
        return (gathered_stage(spec, chunk, resharded=self.number == PART),)


class BesideStates:
    """What a stage holds besides its states. Its moments hold the same parts in different numbers.

    Args:
        spec: the run.
        stage: the stage.
        sizer: sizes of the run's blocks.
    """

    def __init__(self, spec: Spec, stage: Stage, sizer: ProgramSizer) -> None:
        self._given = spec, stage, sizer
        self._alike = alike_chunks(spec, stage)
        self._sums: dict[tuple[str, int, int], dict[int, int]] = {}  # of one copy of each part

    def rows(self, moment: Moment) -> tuple[RowDraft, ...]:
        """Return the rows of a moment."""
        spec, _, _ = self._given
        return tuple(
            row if part.copies == 1 else row._replace(count=row.count * part.copies)
            for part in moment.parts(spec)
            if part.copies
            for row in part.rows(*self._given)
        )

    def sums(self, moment: Moment) -> Mapping[int, int]:
        """Return the bytes of a moment's rows by mask of phases, without the rows."""
        spec, _, _ = self._given
        sums: dict[int, int] = {}
        for part in moment.parts(spec):
            for mask, size in self._sums_of(part).items():
                sums[mask] = sums.get(mask, 0) + part.copies * size
        return sums

    def _sums_of(self, part: Part) -> Mapping[int, int]:
        key = part.kind, self._alike[part.chunk], part.number
        if key not in self._sums:
            sums = self._sums[key] = dict[int, int]()
            for row in part.rows(*self._given):
                sums[row.mask] = sums.get(row.mask, 0) + row.count * row.block
        return self._sums[key]


def alike_chunks(spec: Spec, stage: Stage) -> tuple[int, ...]:
    """Return for each chunk of a stage the number of the first one with the same layers."""
    kinds = [composition(spec, chunk) for chunk in stage.chunks]
    return tuple(kinds.index(kind) for kind in kinds)


def moments_of(spec: Spec, stage: Stage) -> tuple[Moment, ...]:
    """Return the micro-batches of a stage that may hold most."""
    zero_stage = spec.parallelism.zero_stage if gathers_stages(spec) else 0
    if is_steady(spec, stage):
        states = (ChunkState(parameters=WHOLE if zero_stage else NONE),) * len(stage.chunks)
        received, _ = received_tensors(spec, stage)
        return tuple(
            Moment(chunk, states, passed=Passed(max(received - chunk.in_flight, 0))) for chunk in pieces_of(spec, stage)
        )
    alike = alike_chunks(spec, stage)
    micro_batches, counted = spec.training.gradient_accumulation_steps, counted_micro_batches(spec)
    schedule = spec.parallelism.schedule, spec.parallelism.pipeline_parallel
    return _moments(*schedule, stage, counted, micro_batches - counted, alike, zero_stage, keeps_sent=lists_sent(spec))


@lru_cache(maxsize=1024)
def _moments(
    schedule: str,
    stages: int,
    stage: Stage,
    micro_batches: int,
    others: int,
    alike: tuple[int, ...],
    zero_stage: int,
    *,
    keeps_sent: bool,
) -> tuple[Moment, ...]:
    """Return the micro-batches of a step that no other one exceeds in everything.

    Args:
        schedule: the schedule.
        stages: how many stages it has.
        stage: the stage.
        micro_batches: how many these are.
        others: micro-batches of the step that are not among them.
        alike: for each chunk of the stage, the index of the first one with the same layers.
        zero_stage: that of FSDP2 around each chunk; 0: the chunks are not sharded, and nothing is gathered.
        keeps_sent: whether the schedule keeps all that the step has sent.
    """
    chunks, numbers = stage.chunks, range(len(alike))
    flying, ran_forward, states = [0] * len(alike), [True] * len(alike), [ChunkState()] * len(alike)
    after_forward, in_backward, after_last = NONE, NONE, ChunkState(gradients=WHOLE)
    if zero_stage:
        after_forward, in_backward = PART if zero_stage == FULLY_SHARDED else WHOLE, WHOLE
        after_last = ChunkState(gradients=PART)
    sent = others * stage.sends
    buffers = (micro_batches + others) * sum(not chunk.has_embedding for chunk in chunks)
    found: dict[Moment, None] = {}
    for action in actions_in(schedule, stages, stage, micro_batches):
        number = action.chunk
        if action.kind in ("unshard", "reshard"):
            states[number] = states[number]._replace(
                parameters=WHOLE if action.kind == "unshard" and zero_stage else NONE
            )
            continue
        if action.kind in ("assign", "reduce"):
            continue
        if action.kind == "forward":
            flying[number] += 1
            ran_forward[number] = True
            states[number] = states[number]._replace(parameters=after_forward)
            sent += not chunks[number].has_head
            continue
        same = [each for each in numbers if alike[each] == alike[number]]
        chunk = chunks[alike[number]]._replace(in_flight=sum(flying[each] for each in same))
        chunk = chunk._replace(
            embeddings=flying[number] if chunk.has_embedding else 1, heads=flying[number] if chunk.has_head else 1
        )
        is_made, is_last = states[number].gradients != NONE, action.micro_batch == micro_batches - 1
        states[number] = states[number]._replace(parameters=in_backward)
        held = [state if each in same else state._replace(in_flight=flying[each]) for each, state in enumerate(states)]
        inputs = sum(flying[each] for each in numbers if not chunks[each].has_embedding)
        passed = Passed(max(buffers - inputs, 0), sent if keeps_sent else 0)
        found[Moment(chunk, tuple(held), is_made, ran_forward[number] or not zero_stage, passed)] = None
        flying[number] -= 1
        ran_forward[number] = False
        states[number] = after_last if is_last else ChunkState(WHOLE, in_backward)
        sent += not chunks[number].has_embedding
    return tuple(_undominated([*found]))


def _undominated(moments: Sequence[Moment]) -> Iterator[Moment]:
    """Return the moments without those that hold no more of anything than another one of their chunk."""
    alike: dict[tuple[int, bool], dict[Moment, tuple[int, ...]]] = {}
    for each in moments:
        alike.setdefault((each.chunk.first, each.after_forward), {})[each] = each.amounts
    kept: set[Moment] = set()
    for group in alike.values():
        most: list[tuple[int, ...]] = []
        # A moment that holds more than another one has a larger sum of amounts.
        for each, amounts in sorted(group.items(), key=lambda pair: -sum(pair[1])):
            if not any(all(map(ge, more, amounts)) for more in most):
                most.append(amounts)
                kept.add(each)
    return (each for each in moments if each in kept)
