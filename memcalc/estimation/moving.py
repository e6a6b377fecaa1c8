"""What moves: activations, logits, gradients in the making and temporaries, of both steps; and the peak with them."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.estimation.communication import communication_buffers
from memcalc.estimation.engines.buffers import Around
from memcalc.estimation.evaluation import evaluation_moments
from memcalc.estimation.items import Item, phases_of, run_phases
from memcalc.estimation.moments import Highest
from memcalc.estimation.passes import beside, first_workspace, passes_of, pieces_of
from memcalc.estimation.planned import PlannedTimeline
from memcalc.estimation.stages import Stage
from memcalc.estimation.standing import standing_items
from memcalc.estimation.states import state_sums
from memcalc.estimation.symbols import symbol_values
from memcalc.estimation.timeline import Timeline
from memcalc.spec.cards import Card
from memcalc.spec.segments import has_segments
from memcalc.spec.spec import Spec


def moving_items(spec: Spec, stage: Stage, card: Card | None) -> list[Item]:
    """All that is on a rank of a stage beside its states."""
    standing, around = _standing(spec, stage, card)
    for timeline, moments in _highest_moments(spec, stage, card, around):
        standing += timeline.items(moments)
    return standing


def peak_bytes(spec: Spec, stage: Stage, card: Card | None, *, tails: bool = True) -> int:
    """Allocated bytes at the peak of a rank, without the rows that say what they are.

    Args:
        spec: the run.
        stage: the pipeline stage of the rank.
        card: for the scratch of kernels that depends on it.
        tails: with the remainders that the allocator does not split off the blocks of model states. Without them the
            sum is what is requested, rounded up to blocks: no run allocates less.
    """
    phases = run_phases(spec)
    totals = dict.fromkeys(phases, 0)
    for (phase, _), amount in state_sums(spec, stage, tails=tails).items():
        totals[phase] += amount
    standing, around = _standing(spec, stage, card)
    for item in standing:
        for phase in phases_of(item.mask, phases):
            totals[phase] += item.count * item.block
    for _, moments in _highest_moments(spec, stage, card, around):
        for moment, mask in moments:
            for phase in phases_of(mask, phases):
                totals[phase] += moment.bytes
    return max(totals.values())


def _standing(spec: Spec, stage: Stage, card: Card | None) -> tuple[list[Item], Around]:
    """What stands through phases, and the engine's buffers around the layers."""
    buffers = communication_buffers(spec, stage)
    items = [*buffers.steady, *standing_items(spec, stage, card), *first_workspace(spec, stage, card)]
    return items, buffers.around


def _highest_moments(
    spec: Spec, stage: Stage, card: Card | None, around: Around
) -> Iterator[tuple[Timeline, list[tuple[Highest, int]]]]:
    """The highest moments of the passes, each with the mask of its phases, by the timeline that they are in."""
    values = symbol_values(spec, card)
    kind = PlannedTimeline if has_segments(spec.training.recompute) else Timeline
    for exist, passes in passes_of(spec, stage, card):
        surroundings = beside(spec, around, exist=exist)
        timelines = [kind(spec, piece, values, *surroundings) for piece in pieces_of(spec, stage)]
        several = [[timeline.highest(each.stream, each.workspace) for each in passes] for timeline in timelines]
        # Chunks of a stage run one after the other: of each phase the one with the highest moment counts.
        winners = [_first_highest(of_chunk) for of_chunk in zip(*several, strict=True)]
        for index, timeline in enumerate(timelines):
            won = zip(passes, several[index], winners, strict=True)
            yield timeline, [(moment, each.mask) for each, moment, winner in won if winner == index]
    yield from evaluation_moments(spec, stage, card, around)


def _first_highest(moments: tuple[Highest, ...]) -> int:
    """Which of several moments is the highest; of equal ones the first."""
    return max(range(len(moments)), key=lambda index: moments[index].bytes)
