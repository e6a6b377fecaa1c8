"""Passes of both steps (forward, loss, backward): which phases are identical, and the engine's buffers in them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from memcalc.estimation.arriving import gradients_on_arrival
from memcalc.estimation.blocks.catalogue import Gradients
from memcalc.estimation.choice import choice_of
from memcalc.estimation.engines.buffers import Around
from memcalc.estimation.items import STEPS, Item, mask_of
from memcalc.estimation.program import Stream
from memcalc.estimation.recipe_copies import gradients_exist
from memcalc.estimation.stages import Stage, composition
from memcalc.estimation.standing import uses_torch_products, workspace
from memcalc.ledger.component import Component
from memcalc.spec.cards import Card
from memcalc.spec.spec import Spec


class Pass(NamedTuple):
    """Phases with one peak, for example the first and later steps' forward.

    Args:
        stream: forward, loss or backward.
        workspace: the cuBLAS workspace that backward's first matmul allocates, if any.
        mask: bits of the phases.
    """

    stream: Stream
    workspace: Item | None
    mask: int


def passes_of(spec: Spec, stage: Stage, card: Card | None) -> Iterator[tuple[bool, tuple[Pass, ...]]]:
    """Yield whether gradients exist when backward starts, with the passes for which that holds."""
    choice = choice_of(spec)
    making = workspace("backward", spec, card, 0)
    warm = choice.accumulates or not uses_torch_products(spec, stage)
    steps_by_start: dict[bool, list[int]] = {}
    for step in range(1, STEPS + 1):
        steps_by_start.setdefault(gradients_exist(choice, step), []).append(step)
    for exist, steps in steps_by_start.items():
        yield (
            exist,
            (
                Pass("forward", None, _mask("forward", tuple(steps))),
                Pass("loss", None, _mask("loss", tuple(steps))),
                *_backward(making, steps, warm=warm),
            ),
        )


def _backward(making: Item, steps: list[int], *, warm: bool) -> Iterator[Pass]:
    """Yield the backward passes; the first matmul of the first one allocates cuBLAS's workspace.

    With gradient accumulation an earlier micro-batch has allocated the workspace.
    """
    if 1 not in steps or warm:
        yield Pass("backward", None, _mask("backward", tuple(steps)))
        return
    yield Pass("backward", making, mask_of("backward_1"))
    yield Pass("backward", None, _mask("backward", tuple(step for step in steps if step > 1)))


def pieces_of(spec: Spec, stage: Stage) -> tuple[Stage, ...]:
    """Return the chunks of a stage; of chunks with identical layers, only the first, since their peaks are equal."""
    alike: dict[object, Stage] = {}
    for piece in stage.chunks:
        alike.setdefault(composition(spec, piece), piece)
    return tuple(alike.values())


def first_workspace(spec: Spec, stage: Stage, card: Card | None) -> list[Item]:
    """Return cuBLAS's workspace in the later micro-batches of the first step; the first micro-batch allocated it."""
    if choice_of(spec).accumulates and uses_torch_products(spec, stage):
        return [workspace("backward", spec, card, mask_of("forward_1", "loss_1", "backward_1"))]
    return []


def beside(spec: Spec, around: Around, *, exist: bool) -> tuple[Gradients, Around]:
    """Return the policy for produced gradients, and the engine's per-layer buffers."""
    gradients = gradients_on_arrival(spec, exist=exist, sharded=bool(around.layer_share))
    if exist:  # a layer's shard is added to existing gradients
        added = {
            experts: share._replace(each=0, block=0) if share.component is Component.GRADIENTS else share
            for experts, share in around.layer_share.items()
        }
        around = around._replace(layer_share=added, share_of_head=())
    return gradients, around


@cache
def _mask(phase: str, steps: tuple[int, ...]) -> int:
    return mask_of(*(f"{phase}_{step}" for step in steps))
