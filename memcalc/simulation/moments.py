"""The micro-batches of a pipeline stage that may hold most, and what the stage holds besides its states while they run.

In a steady step that is the last micro-batch in flight: the most are in flight, and all gradients exist. With few
micro-batches the first backward has the most in flight, but meets no gradients, and later ones meet more gradients with
fewer in flight. Several chunks get their gradients in turn.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from memcalc.layout.schedules import uses_pipelining
from memcalc.layout.stages import Stage, composition, is_steady
from memcalc.ledger.row_drafts import RowDraft
from memcalc.sharding.schedules import order_of, played_micro_batches
from memcalc.simulation.passes import pieces_of
from memcalc.spec.spec import Spec
from memcalc.spec.zero import FULLY_SHARDED
from memcalc.states.communication_buffers import bucket_between_passes
from memcalc.states.model_states import earlier_gradients, reduced_gradients
from memcalc.states.pipeline_engine import kept_in_flight
from memcalc.states.pipelining import gathered_stage, gathers_stages, in_passes
from memcalc.states.state_options import state_options

NONE, PART, WHOLE = range(3)  # of a chunk's parameters or gradients


class ChunkState(NamedTuple):
    """What a chunk holds before a backward of its stage.

    Args:
        gradients: of earlier micro-batches that the states of the stage do not count: PART of them if FSDP2 has reduced
            them after the chunk's last backward.
        parameters: those that FSDP2 has gathered: PART of them if a forward has resharded the layers since.
    """

    gradients: int = NONE
    parameters: int = NONE


class Moment(NamedTuple):
    """The backward of a micro-batch on a chunk, and the forward before it.

    Args:
        chunk: the chunk, with the micro-batches in flight before the backward.
        states: of each chunk of the stage.
        is_made: whether the chunk itself has gradients of earlier micro-batches that the states do not count.
        after_forward: whether a forward of the chunk ran since its last backward.
    """

    chunk: Stage
    states: tuple[ChunkState, ...]
    is_made: bool = False
    after_forward: bool = True

    def exceeds(self, other: Moment) -> bool:
        """Return whether it holds at least as much of everything as another one, and is not equal to it."""
        if self == other or self.after_forward != other.after_forward or self.chunk.first != other.chunk.first:
            return False
        pairs = zip(self._amounts, other._amounts, strict=True)
        return all(own >= its for own, its in pairs)

    @property
    def _amounts(self) -> tuple[int, ...]:
        chunk = self.chunk
        return (chunk.in_flight, chunk.embeddings, chunk.heads, self.is_made, *chain.from_iterable(self.states))

    def rows(self, spec: Spec, stage: Stage) -> tuple[RowDraft, ...]:
        """Return what the stage holds besides its states while the micro-batch runs."""
        found = [*in_passes(spec, stage, self.chunk.in_flight)] if uses_pipelining(spec) else []
        if spec.parallelism.has_pipeline_engine:
            found += kept_in_flight(spec, stage, self.chunk.in_flight)
        if any(state.gradients for state in self.states):
            found += bucket_between_passes(state_options(spec))
        for chunk, state in zip(stage.chunks, self.states, strict=True):
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
        return tuple(Moment(chunk, states) for chunk in pieces_of(spec, stage))
    kinds = [composition(spec, chunk) for chunk in stage.chunks]
    alike = tuple(kinds.index(kind) for kind in kinds)
    order = spec.parallelism.schedule, spec.parallelism.pipeline_parallel
    return _moments(*order, stage, played_micro_batches(spec), alike, zero_stage)


@lru_cache(maxsize=1024)
def _moments(
    schedule: str, stages: int, stage: Stage, micro_batches: int, alike: tuple[int, ...], zero_stage: int
) -> tuple[Moment, ...]:
    """Return the micro-batches of a step that no other one exceeds in everything.

    Args:
        schedule: the schedule.
        stages: the number of stages.
        stage: the stage.
        micro_batches: micro-batches of a step.
        alike: for each chunk of the stage, the index of the first one with the same layers.
        zero_stage: that of FSDP2 around each chunk; 0: the chunks are not sharded.
    """
    flying, ran_forward, states = [0] * len(alike), [True] * len(alike), [ChunkState()] * len(alike)
    after_forward, in_backward, after_last = NONE, NONE, ChunkState(gradients=WHOLE)
    if zero_stage:
        after_forward, in_backward = PART if zero_stage == FULLY_SHARDED else WHOLE, WHOLE
        after_last = ChunkState(gradients=PART)
    found: dict[Moment, None] = {}
    for action in order_of(schedule, stages, stage, micro_batches):
        number = action.chunk
        if action.kind == "forward":
            flying[number] += 1
            ran_forward[number] = True
            states[number] = states[number]._replace(parameters=after_forward)
            continue
        chunk = stage.chunks[alike[number]]._replace(in_flight=sum(flying))
        chunk = chunk._replace(
            embeddings=flying[number] if chunk.has_embedding else 1, heads=flying[number] if chunk.has_head else 1
        )
        is_made, is_last = states[number].gradients != NONE, action.micro_batch == micro_batches - 1
        states[number] = states[number]._replace(parameters=in_backward)
        found[Moment(chunk, tuple(states), is_made, ran_forward[number] or not zero_stage)] = None
        flying[number] -= 1
        ran_forward[number] = False
        states[number] = after_last if is_last else ChunkState(WHOLE, in_backward)
    return tuple(each for each in found if not any(other.exceeds(each) for other in found))
