"""The micro-batches of a pipeline stage that may hold most, and what the stage holds besides its states while they run.

In a steady step that is the last micro-batch in flight: the most are in flight, and all gradients exist. With few
micro-batches the first backward has the most in flight, but meets no gradients, and later ones meet more gradients with
fewer in flight. Several chunks get their gradients in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from operator import ge
from typing import NamedTuple

from memcalc.layout.schedules import uses_pipelining
from memcalc.layout.stages import Stage, composition, is_steady
from memcalc.ledger.row_drafts import RowDraft
from memcalc.programs.sized_program import ProgramSizer
from memcalc.sharding.schedules import Action, actions_of, counted_micro_batches
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

    def rows(self, spec: Spec, stage: Stage, sizer: ProgramSizer) -> tuple[RowDraft, ...]:
        """Return what the stage holds besides its states while the micro-batch runs."""
        received, sent = self.passed
        found = [*in_passes(spec, received=received, sent=sent)] if uses_pipelining(spec) else []
        if spec.parallelism.has_pipeline_engine:
            found += kept_in_flight(spec, stage, self.chunk.in_flight)
        if any(state.gradients for state in self.states):
            found += bucket_between_passes(state_options(spec))
        for chunk, state in zip(stage.chunks, self.states, strict=True):
            if state.in_flight:
                found += kept_activations(spec, chunk, sizer, state.in_flight)
            if state.gradients:
                found += (earlier_gradients if state.gradients == WHOLE else reduced_gradients)(spec, chunk)
            if state.parameters:
                found.append(gathered_stage(spec, chunk, resharded=state.parameters == PART))
        return tuple(found)


def moments_of(spec: Spec, stage: Stage) -> tuple[Moment, ...]:
    """Return the micro-batches of a stage that may hold most."""
    zero_stage = spec.parallelism.zero_stage if gathers_stages(spec) else 0
    if is_steady(spec, stage):
        states = (ChunkState(parameters=WHOLE if zero_stage else NONE),) * len(stage.chunks)
        received, _ = received_tensors(spec, stage)
        return tuple(
            Moment(chunk, states, passed=Passed(max(received - chunk.in_flight, 0))) for chunk in pieces_of(spec, stage)
        )
    kinds = [composition(spec, chunk) for chunk in stage.chunks]
    alike = tuple(kinds.index(kind) for kind in kinds)
    micro_batches, counted = spec.training.gradient_accumulation_steps, counted_micro_batches(spec)
    order = tuple(actions_of(spec, stage, counted))
    return _moments(order, stage, counted, micro_batches - counted, alike, zero_stage, keeps_sent=lists_sent(spec))


@lru_cache(maxsize=1024)
def _moments(
    order: tuple[Action, ...],
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
        order: the actions of the step.
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
    for action in order:
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
