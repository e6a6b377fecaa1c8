"""Courses: the moments of a stage, shared by all runs whose stages differ in sizes and numbers alone."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.engine.moments import MANY, Counts, Course
from memcalc.engine.unsized import Unsized
from memcalc.estimation.blocks.catalogue import Gradients
from memcalc.estimation.blocks.structure import Structure
from memcalc.estimation.engines.buffers import Around
from memcalc.estimation.items import Item
from memcalc.estimation.moments import Holding, others_of
from memcalc.estimation.sharding import Parameters
from memcalc.estimation.stages import Stage, composition, one_in_flight
from memcalc.ledger.component import Component
from memcalc.spec.spec import Spec

# Of each place of `Around` the slots of its buffers, then those of its two mappings.
Pattern = tuple[tuple[tuple[int, ...], ...], tuple[tuple[bool, int], ...], tuple[tuple[bool, int], ...]]

MOST_COURSES = 4096  # that are kept

_COURSES: dict[object, Course] = {}


class Surroundings(NamedTuple):
    """What becomes of gradients on arrival, and the engine's buffers around the layers.

    Args:
        gradients: on arrival.
        pattern: where there are buffers, as numbers of slots.
        items: the buffer of each slot.
    """

    gradients: Gradients
    pattern: Pattern
    items: tuple[Item, ...]


def surroundings_of(gradients: Gradients, around: Around) -> Surroundings:
    """Buffers, told apart from where they are."""
    numbers: dict[int, int] = {}
    items: list[Item] = []

    def slot(item: Item) -> int:
        if id(item) not in numbers:
            numbers[id(item)] = len(items)
            items.append(item)
        return numbers[id(item)]

    *places, shares, gathered = around
    pattern = (
        tuple([tuple([slot(item) for item in place]) for place in places]),
        tuple([(kind, slot(item)) for kind, item in shares.items()]),
        tuple([(kind, slot(item)) for kind, item in gathered.items()]),
    )
    return Surroundings(gradients, pattern, tuple(items))


def others(course: Course, chunk: Stage) -> Counts:
    """What the other micro-batches in flight of a chunk hold whatever the moment is, see `Course.found`."""
    timeline = course.timeline

    def holdings() -> list[Holding]:
        return [
            (number, storages, count)
            for number, block in enumerate(timeline.blocks)
            for storages, count in others_of(chunk, block.part, block.program, block.kind)
        ]

    return course.found(flights(chunk), holdings)


def layers(chunk: Stage) -> int:
    """How many layers it has."""
    return chunk.stop - chunk.first


def flights(chunk: Stage) -> tuple[int, int, int, int]:
    """How many micro-batches are in flight: of its layers, of the embedding, of the head, and behind the head."""
    return chunk.in_flight, chunk.embeddings, chunk.heads, chunk.waiting


def course_of(
    spec: Spec,
    structure: Structure,
    stage: Stage,
    gradients: Gradients,
    pattern: Pattern,
    parameters: Parameters | None = None,
) -> Course:
    """The course of a stage, or of one chunk of it.

    Args:
        spec: the run.
        structure: its structure.
        stage: the one that stands for it (`stands_for`).
        gradients: what becomes of them on arrival.
        pattern: where the engine has buffers.
        parameters: those of the stage, if their sizes decide where there are moments (`counts_elements`).

    Raises:
        InputError: the implementation is not modelled.
    """
    choices = (spec.training.recompute, spec.parallelism.engine)
    key = (spec.model, structure, *choices, stage, gradients, pattern, parameters)
    if key not in _COURSES:
        while len(_COURSES) >= MOST_COURSES:
            del _COURSES[next(iter(_COURSES))]
        if stage.stop == MANY:
            spec = spec.model_copy(update={"model": spec.model.model_copy(update={"num_layers": MANY})})
        places, shares, gathered = pattern
        used = [number for place in places for number in place] + [number for _, number in (*shares, *gathered)]
        slots = [_slot(number) for number in range(max(used, default=-1) + 2)]
        empty = Around._make(
            (
                *(tuple(slots[number] for number in place) for place in places),
                {kind: slots[number] for kind, number in shares},
                {kind: slots[number] for kind, number in gathered},
            )
        )
        _COURSES[key] = Course(Unsized(spec, stage, {}, gradients, empty), slots)
    return _COURSES[key]


def counts_elements(around: Around) -> bool:
    """Whether the engine counts parameters layer by layer to know where it holds something.

    DeepSpeed does: its bucket is full in one of them, and it gathers most around one of them.
    """
    return bool(around.on_gradient or around.forward_widest)


def stands_for(spec: Spec, stage: Stage, *, exactly: bool = False) -> Stage:
    """The stage whose moments those of this one follow from: with one micro-batch in flight.

    Where its layers are alike it stands at the beginning of the model, and has `MANY` of them: the first, the last and
    those between them. `exactly`: each layer stands for itself.
    """
    first, stop, count = stage.first, stage.stop, layers(stage)
    if not exactly and composition(spec, stage) == (count, stage.has_embedding, stage.has_head):
        first, stop = 0, MANY if count > len(("the first", "the last")) else count
    return one_in_flight(stage)._replace(first=first, stop=stop, pieces=())


def _slot(number: int) -> Item:
    return Item(Component.COMMUNICATION_BUFFERS, "engine", f"slot {number}", (), "uint8", 1, 0, 0, 0, "", "")
