"""What moves: activations, logits, gradients in the making and temporaries, of both steps; and the peak with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from memcalc.estimation.communication import communication_buffers
from memcalc.estimation.engines.buffers import Around
from memcalc.estimation.evaluation import evaluated, evaluation_timelines
from memcalc.estimation.items import EVALUATION, Item, mask_of, phases_of, run_phases
from memcalc.estimation.moments import Candidate, Highest
from memcalc.estimation.passes import beside, first_workspace, passes_of, pieces_of
from memcalc.estimation.planned import PlannedTimeline
from memcalc.estimation.sized import Sizer, run_sizer
from memcalc.estimation.stages import Stage
from memcalc.estimation.standing import standing_items
from memcalc.estimation.states import state_sums
from memcalc.estimation.timeline import Timeline
from memcalc.spec.cards import Card
from memcalc.spec.segments import has_segments
from memcalc.spec.spec import Spec


class Span(NamedTuple):
    """Phases with one peak: the first step's and later ones' forward, for instance.

    Args:
        mask: these phases.
        candidates: the moments that may be the peak, in order, each with its timeline.
    """

    mask: int
    candidates: Iterator[tuple[Timeline, Candidate]]

    def highest(self) -> tuple[Timeline, Highest]:
        """The peak, of equal ones the first, and its timeline."""
        sizes = ((timeline.bytes(moment), timeline, moment) for timeline, moment in self.candidates)
        total, timeline, moment = max(sizes, key=lambda each: each[0])
        return timeline, Highest(total, moment)


def moving_items(spec: Spec, stage: Stage, card: Card | None) -> list[Item]:
    """All that is on a rank of a stage beside its states."""
    items, around = standing(spec, stage, card)
    highest: dict[Timeline, list[tuple[Highest, int]]] = {}
    for span in spans(spec, stage, card, around):
        timeline, moment = span.highest()
        highest.setdefault(timeline, []).append((moment, span.mask))
    for timeline, moments in highest.items():
        items += timeline.items(moments)
    return items


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
    items, around = standing(spec, stage, card)
    for item in items:
        for phase in phases_of(item.mask, phases):
            totals[phase] += item.count * item.block
    for span in spans(spec, stage, card, around):
        _, moment = span.highest()
        for phase in phases_of(span.mask, phases):
            totals[phase] += moment.bytes
    return max(totals.values())


def standing(spec: Spec, stage: Stage, card: Card | None) -> tuple[list[Item], Around]:
    """What stands through phases, and the engine's buffers around the layers."""
    buffers = communication_buffers(spec, stage)
    items = [*buffers.steady, *standing_items(spec, stage, card), *first_workspace(spec, stage, card)]
    return items, buffers.around


def spans(
    spec: Spec,
    stage: Stage,
    card: Card | None,
    around: Around,
    sizer_of: Callable[[Spec, Card | None], Sizer] = run_sizer,
) -> Iterator[Span]:
    """What comes and goes on a stage, by phases that are alike.

    Args:
        spec: the run.
        stage: the pipeline stage. Its chunks run one after the other, so that all of their moments count.
        card: for the scratch of kernels that depends on it.
        around: the engine's buffers around the layers.
        sizer_of: gives the sizes of a run on a card.
    """
    sizer = sizer_of(spec, card)
    kind = PlannedTimeline if has_segments(spec.training.recompute) else Timeline
    for exist, passes in passes_of(spec, stage, card):
        surroundings = beside(spec, around, exist=exist)
        timelines = [kind(spec, piece, sizer, *surroundings) for piece in pieces_of(spec, stage)]
        for each in passes:
            candidates = [(of, moment) for of in timelines for moment in of.candidates(each.stream, each.workspace)]
            yield Span(each.mask, iter(candidates))
    if spec.training.evaluation_batch_size is not None:
        run = evaluated(spec)
        evaluations = evaluation_timelines(run, stage, sizer_of(run, card), around)
        moments = [(of, each) for of in evaluations for stream in ("forward", "loss") for each in of.candidates(stream)]
        yield Span(mask_of(EVALUATION), iter(moments))
