"""Passes of both steps (forward, loss, backward), and which of their phases are identical."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from memcalc.layout.stages import Stage, Start, composition
from memcalc.ledger.row_drafts import STEPS, RowDraft, mask_of
from memcalc.programs.program import Stream
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.spec import Spec
from memcalc.states.persistent import uses_torch_products, workspace
from memcalc.states.pipelining import uses_pipelining
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
    """Yield pairs: whether gradients exist when backward starts, and the passes for which that holds."""
    options = state_options(spec)
    making = workspace("backward", spec, gpu, 0)
    warm = options.step.accumulates or not uses_torch_products(spec, stage)
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


def starts_of(spec: Spec, chunk: Stage, *, exist: bool) -> tuple[tuple[Stage, Start], ...]:
    """Return the micro-batches of a chunk that may hold most: the chunk in flight, and where in a step backward is.

    Where as many micro-batches are in flight as there are, or in a single round of interleaved ones, their first
    backward meets no gradients of earlier ones. The second one meets gradients, but there may be one micro-batch less
    in flight. Both are evaluated under FSDP2, where gradients are unsharded; elsewhere only the last one in flight.
    """
    micro_batches, virtual = spec.training.gradient_accumulation_steps, spec.parallelism.virtual_stages
    sharded = spec.parallelism.engine == "fsdp2" and uses_pipelining(spec)
    if not sharded or micro_batches == 1 or (exist and (virtual > 1 or chunk.in_flight < micro_batches)):
        return ((chunk, "steady"),)
    copies = micro_batches * virtual
    after: Start = "second" if chunk.in_flight == copies else "second, after a forward"
    second = chunk._replace(
        in_flight=min(chunk.in_flight, copies - 1),
        embeddings=min(chunk.embeddings, micro_batches - 1),
        heads=min(chunk.heads, micro_batches - 1),
    )
    return (chunk, "first"), (second, after)


def first_workspace(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> list[RowDraft]:
    """Return cuBLAS's workspace in the later micro-batches of the first step; the first micro-batch allocated it."""
    if state_options(spec).step.accumulates and uses_torch_products(spec, stage):
        return [workspace("backward", spec, gpu, mask_of("forward_1", "loss_1", "backward_1"))]
    return []


@cache
def _mask(phase: str, steps: tuple[int, ...]) -> int:
    return mask_of(*(f"{phase}_{step}" for step in steps))
