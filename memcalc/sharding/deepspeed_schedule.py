"""The schedule of DeepSpeed's pipeline engine (DeepSpeed 0.19 runtime/pipe/schedule.py, TrainSchedule), one stage."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple


class Instruction(Enum):
    """What the engine does with a micro-batch, in one of its pipeline buffers (PipeInstruction)."""

    LOAD = auto()
    RECEIVE_INPUT = auto()
    FORWARD = auto()
    SEND_OUTPUT = auto()
    RECEIVE_GRADIENT = auto()
    BACKWARD = auto()
    SEND_GRADIENT = auto()


class PipeCommand(NamedTuple):
    """An instruction of the schedule and the number of its micro-batch."""

    instruction: Instruction
    micro_batch: int


def commands(stages: int, stage: int, micro_batches: int) -> Iterator[PipeCommand]:
    """Yield the commands of a step on one stage, without the reduction and the optimizer step. Source: steps.

    Args:
        stages: the number of stages.
        stage: the stage, from 0.
        micro_batches: micro-batches of a step.
    """
    has_previous, has_next = stage > 0, stage < stages - 1
    loads = not (has_previous and has_next)
    before = -1
    for step in range(2 * (micro_batches + stages - 1)):
        is_forward = step % 2 == stage % 2
        number = _micro_batch(step, stages, stage, is_forward=is_forward)
        is_valid, was_valid = 0 <= number < micro_batches, 0 <= before < micro_batches
        if is_forward:
            if was_valid and has_previous:
                yield PipeCommand(Instruction.SEND_GRADIENT, before)
            if is_valid and has_previous:
                yield PipeCommand(Instruction.RECEIVE_INPUT, number)
            if is_valid and loads:
                yield PipeCommand(Instruction.LOAD, number)
        else:
            if is_valid and has_next:
                yield PipeCommand(Instruction.RECEIVE_GRADIENT, number)
            if was_valid and has_next:
                yield PipeCommand(Instruction.SEND_OUTPUT, before)
        if is_valid:
            yield PipeCommand(Instruction.FORWARD if is_forward else Instruction.BACKWARD, number)
        before = number


def _micro_batch(step: int, stages: int, stage: int, *, is_forward: bool) -> int:
    """Return the number of a step's micro-batch, which is none of the batch in the first and last steps.

    Source: _step_to_micro_batch.
    """
    if is_forward:
        return step // 2 - stage // 2
    if stage % 2:
        return step // 2 - stages + (stage + 1) // 2
    return (step - 1) // 2 - stages + 1 + stage // 2
