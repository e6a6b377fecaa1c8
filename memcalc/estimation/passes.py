"""The passes of both steps: which phases are alike, and what stands around them."""

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
    """Phases whose highest moment is one: the first step's and later ones' forward, for instance."""

    stream: Stream
    workspace: Item | None  # that the first matrix product of backward makes
    mask: int


def passes_of(spec: Spec, stage: Stage, card: Card | None) -> Iterator[tuple[bool, tuple[Pass, ...]]]:
    """Whether gradients exist when backward starts, and the passes in which that is so."""
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
    """The first backward's first matrix product makes cuBLAS's workspace, unless another micro-batch came before."""
    if 1 not in steps or warm:
        yield Pass("backward", None, _mask("backward", tuple(steps)))
        return
    yield Pass("backward", making, mask_of("backward_1"))
    yield Pass("backward", None, _mask("backward", tuple(step for step in steps if step > 1)))


def pieces_of(spec: Spec, stage: Stage) -> tuple[Stage, ...]:
    """The chunks of a stage; of those that are alike, which have the same highest moments, the first."""
    alike: dict[object, Stage] = {}
    for piece in stage.chunks:
        alike.setdefault(composition(spec, piece), piece)
    return tuple(alike.values())


def first_workspace(spec: Spec, stage: Stage, card: Card | None) -> list[Item]:
    """cuBLAS's workspace in the first step's later micro-batches: the first one's backward has made it."""
    if choice_of(spec).accumulates and uses_torch_products(spec, stage):
        return [workspace("backward", spec, card, mask_of("forward_1", "loss_1", "backward_1"))]
    return []


def beside(spec: Spec, around: Around, *, exist: bool) -> tuple[Gradients, Around]:
    """What becomes of gradients on arrival, and the engine's buffers around the layers."""
    gradients = gradients_on_arrival(spec, exist=exist, sharded=bool(around.layer_share))
    if exist:  # a layer's share is added to the gradients that are there
        added = {
            experts: share._replace(each=0, block=0) if share.component is Component.GRADIENTS else share
            for experts, share in around.layer_share.items()
        }
        around = around._replace(layer_share=added, share_of_head=())
    return gradients, around


@cache
def _mask(phase: str, steps: tuple[int, ...]) -> int:
    return mask_of(*(f"{phase}_{step}" for step in steps))
