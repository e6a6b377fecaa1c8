"""One pipeline stage over many batches: what `estimation.estimate` adds up row by row, as sums of atoms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from memcalc.engine.atoms import Atoms
from memcalc.engine.courses import (
    Pattern,
    counts_elements,
    course_of,
    flights,
    layers,
    others,
    stands_for,
    surroundings_of,
)
from memcalc.engine.moments import Course, Numbers, Streams
from memcalc.engine.moving import Held, Part, Runs
from memcalc.engine.reading import Reader
from memcalc.engine.slots import Slot, slot_of
from memcalc.engine.standing import Standing, standing_of
from memcalc.estimation.blocks.catalogue import Gradients
from memcalc.estimation.blocks.structure import Structure
from memcalc.estimation.communication import communication_buffers
from memcalc.estimation.items import PHASES
from memcalc.estimation.passes import beside, first_workspace, passes_of, pieces_of
from memcalc.estimation.sharding import stage_parameters
from memcalc.estimation.stages import Stage, one_in_flight, stages_that_matter
from memcalc.estimation.standing import standing_items
from memcalc.spec.cards import Card
from memcalc.spec.spec import Spec


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """One stage of a pipeline, whatever it is that runs there.

    Args:
        number: of the stage.
        alone: the stage without its micro-batches in flight: what stands there knows them as little as engines do.
        chunks: those that run one after the other.
    """

    number: int
    alone: Stage
    chunks: tuple[Stage, ...]


class Setting(NamedTuple):
    """What stands around the layers in passes before which gradients do, or do not, exist.

    Args:
        streams: the passes.
        masks: the phases of each.
        gradients: what becomes of them on arrival.
        pattern: where the engine has buffers.
        slots: these buffers, and the workspace of backward.
        exactly: whether the engine counts parameters layer by layer.
    """

    streams: Streams
    masks: tuple[int, ...]
    gradients: Gradients
    pattern: Pattern
    slots: tuple[Slot, ...]
    exactly: bool


@dataclass(frozen=True, eq=False, slots=True)
class Moving:
    """What comes and goes on a stage.

    Args:
        passes: its passes; each as one sequence and as several have it, where these are other tapes.
        pass_of: the number of the pass of each phase; that behind the last one where nothing moves. [phases]
        waiting: what other micro-batches in flight hold in all passes alike, if there are any; likewise.
    """

    passes: tuple[tuple[Runs, ...], ...]
    pass_of: Numbers
    waiting: tuple[Held, ...]


class Rank(NamedTuple):
    """One stage of a run."""

    number: int
    standing: Standing
    moving: Moving


class _Frame(NamedTuple):
    """What is on a stage whatever its layers do."""

    settings: tuple[Setting, ...]
    standing: Standing


def places_of(spec: Spec) -> list[Place]:
    """The stages that may need most."""
    return [
        Place(stage.index, _alone(stage), pieces_of(spec, stage) if stage.pieces else (stage,))
        for stage in stages_that_matter(spec)
    ]


def ranks(
    reader: Reader, kinds: list[tuple[Spec, Structure]], atoms: Atoms, places: list[Place], card: Card | None
) -> list[Rank]:
    """The stages of a run.

    Args:
        reader: remembers what was found of other runs.
        kinds: the run, with any of the batches of each kind, and its structure, the same object for runs of which it
            is the same.
        atoms: what sizes are made of.
        places: its stages, the same object for runs of which they are the same.
        card: the card.

    Raises:
        TooLarge: a size is beyond what float64 holds exactly.
        InputError: it is not modelled.
    """
    found = []
    spec = kinds[0][0]
    choices = (*(id(structure) for _, structure in kinds), spec.training.recompute, spec.parallelism.engine)
    for place in places:
        frame = reader.find(
            ("frame", place.alone, atoms),
            spec,
            partial(_frame, reader=reader, stage=place.alone, atoms=atoms, card=card),
        )
        key = ("moving", *choices, id(place), id(frame.settings))
        if key not in atoms.kept:
            atoms.kept[key] = place, kinds, _moving(kinds, atoms, place, frame.settings)
        found.append(Rank(place.number, frame.standing, atoms.kept[key][2]))
    return found


@lru_cache(maxsize=4096)
def _alone(stage: Stage) -> Stage:
    return one_in_flight(stage)._replace(index=min(stage.index, 1), pieces=tuple(map(one_in_flight, stage.pieces)))


def _frame(run: Spec, reader: Reader, stage: Stage, atoms: Atoms, card: Card | None) -> _Frame:
    over = atoms.batches.on(run)
    buffers = communication_buffers(over, stage)
    exactly = counts_elements(buffers.around)
    settings = []
    for exist, passes in passes_of(over, stage, card):
        gradients, pattern, items = surroundings_of(*beside(over, buffers.around, exist=exist))
        workspace = [each.workspace for each in passes if each.workspace is not None]
        streams = tuple([(each.stream, each.workspace is not None) for each in passes])
        masks = tuple([each.mask for each in passes])
        slots = tuple([slot_of(item, atoms) for item in (*items, *workspace)])
        setting = Setting(streams, masks, gradients, pattern, slots, exactly)
        settings.append(reader.same(("setting", atoms, setting), setting))
    standing = [*buffers.steady, *standing_items(over, stage, card), *first_workspace(over, stage, card)]
    several = tuple(settings)
    return _Frame(reader.same(tuple(map(id, several)), several), standing_of(over, stage, standing, atoms))


def _moving(kinds: list[tuple[Spec, Structure]], atoms: Atoms, place: Place, settings: tuple[Setting, ...]) -> Moving:
    alone = len(settings) == len(place.chunks) == 1  # no moment is the highest because of other micro-batches
    waiting: list[Held] = []
    passes: list[tuple[Runs, ...]] = []
    for setting in settings:
        several: list[list[Part]] = []
        for spec, structure in kinds:
            parts = []
            for chunk in place.chunks:
                course = _course(spec, structure, chunk, setting, atoms)
                held = _held(course, chunk, atoms)
                if alone and held is not None:
                    waiting.append(held)
                parts.append(_part(course, setting, chunk, None if alone else held, atoms))
            several.append(parts)
        passes += [
            tuple([tuple([(part, number) for part in parts]) for parts in several])
            for number in range(len(setting.streams))
        ]
    masks = tuple([mask for setting in settings for mask in setting.masks])
    return Moving(tuple(passes), _pass_of(masks), tuple(waiting))


def _course(spec: Spec, structure: Structure, chunk: Stage, setting: Setting, atoms: Atoms) -> Course:
    whole = stands_for(spec, chunk, exactly=setting.exactly)
    key = ("course", id(structure), spec.training.recompute, spec.parallelism.engine, whole, id(setting))
    if setting.exactly or key not in atoms.kept:
        parameters = stage_parameters(spec, whole) if setting.exactly else None
        course = course_of(spec, structure, whole, setting.gradients, setting.pattern, parameters)
        for block in course.timeline.blocks:
            atoms.learn(block.program)
        atoms.kept[key] = structure, setting, course
    found: Course = atoms.kept[key][-1]
    return found


def _part(course: Course, setting: Setting, chunk: Stage, held: Held | None, atoms: Atoms) -> Part:
    """The part, the same object for chunks that differ in what does not matter."""
    part = Part(course, setting.streams, setting.slots, layers(chunk), held)
    found: Part = atoms.kept.setdefault(("part", course, setting.streams, setting.slots, layers(chunk), held), part)
    return found


def _held(course: Course, chunk: Stage, atoms: Atoms) -> Held | None:
    """What other micro-batches in flight hold."""
    if max(flights(chunk)) == 1:
        return None
    key = ("others", course, flights(chunk), layers(chunk))
    if key not in atoms.kept:
        atoms.kept[key] = Held(course, others(course, chunk), layers(chunk))
    found: Held = atoms.kept[key]
    return found


@lru_cache(maxsize=1024)
def _pass_of(masks: tuple[int, ...]) -> Numbers:
    """The number of the mask that each phase is in."""
    return np.array(
        [next((n for n, mask in enumerate(masks) if mask >> phase & 1), len(masks)) for phase in range(len(PHASES))]
    )
