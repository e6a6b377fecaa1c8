"""Passes of both steps (forward, loss, backward), and which of their phases are identical."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from memcalc.layout.stages import Stage, composition
from memcalc.ledger.row_drafts import STEPS, RowDraft, mask_of
from memcalc.programs.program import Stream
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.spec import Spec
from memcalc.states.model_states import counted_options
from memcalc.states.persistent import uses_torch_products, workspace
from memcalc.states.recipe_copies import gradients_exist
from memcalc.states.state_options import state_options


class PassPhases(NamedTuple):
    """Phases with one peak, for example the first and later steps' forward.

    Args:
        stream: forward, loss or backward.
        workspace: the cuBLAS workspace that backward's first matmul allocates, if any.
        mask: bits of the phases.
    """

    stream: Stream
    workspace: RowDraft | None
    mask: int


def passes_of(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> Iterator[tuple[bool, tuple[PassPhases, ...]]]:
    """Yield pairs: whether the states count gradients when backward starts, and the passes for which that holds."""
    options = counted_options(spec, stage)
    making = workspace("backward", spec, gpu, 0)
    warm = state_options(spec).step.accumulates or not uses_torch_products(spec, stage)
    steps_by_start: dict[bool, list[int]] = {}
    for step in range(1, STEPS + 1):
        steps_by_start.setdefault(gradients_exist(options, step), []).append(step)
    for exist, steps in steps_by_start.items():
        yield (
            exist,
            (
                PassPhases("forward", None, _mask("forward", tuple(steps))),
                PassPhases("loss", None, _mask("loss", tuple(steps))),
                *_backward(making, steps, warm=warm),
            ),
        )


def _backward(making: RowDraft, steps: list[int], *, warm: bool) -> Iterator[PassPhases]:
    """Yield the backward passes; the first matmul of the first one allocates cuBLAS's workspace.

    With gradient accumulation an earlier micro-batch has allocated the workspace.
    """
    if 1 not in steps or warm:
        yield PassPhases("backward", None, _mask("backward", tuple(steps)))
        return
    yield PassPhases("backward", making, mask_of("backward_1"))
    yield PassPhases("backward", None, _mask("backward", tuple(step for step in steps if step > 1)))


def pieces_of(spec: Spec, stage: Stage) -> tuple[Stage, ...]:
    """Return the chunks of a stage; of chunks with identical layers, only the first, since their peaks are equal."""
    alike: dict[object, Stage] = {}
    for piece in stage.chunks:
        alike.setdefault(composition(spec, piece), piece)
    return tuple(alike.values())


def first_workspace(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> list[RowDraft]:
    """Return cuBLAS's workspace in the later micro-batches of the first step; the first micro-batch allocated it."""
    if state_options(spec).step.accumulates and uses_torch_products(spec, stage):
        return [workspace("backward", spec, gpu, mask_of("forward_1", "loss_1", "backward_1"))]
    return []


@cache
def _mask(phase: str, steps: tuple[int, ...]) -> int:
    return mask_of(*(f"{phase}_{step}" for step in steps))
