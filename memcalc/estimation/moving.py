"""Transient tensors of both steps (activations, logits, gradients, temporaries), and their peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from memcalc.estimation.communication import communication_buffers
from memcalc.estimation.engines.buffers import Around
from memcalc.estimation.evaluation import (
    evaluated,
    evaluation_timelines,
    reference_items,
    reference_run,
    scored_by_reference,
)
from memcalc.estimation.items import EVALUATION, Item, mask_of, phases_of, run_phases
from memcalc.estimation.moments import Candidate, Highest
from memcalc.estimation.passes import beside, first_workspace, passes_of, pieces_of
from memcalc.estimation.planned import PlannedTimeline
from memcalc.estimation.remembered import remembered
from memcalc.estimation.sized import Sizer, run_sizer
from memcalc.estimation.stages import Stage
from memcalc.estimation.standing import standing_items
from memcalc.estimation.states import state_sums
from memcalc.estimation.timeline import Timeline
from memcalc.spec.cards import Card
from memcalc.spec.segments import has_segments
from memcalc.spec.spec import Spec


class Span(NamedTuple):
    """Phases that share one peak, for example the first and later steps' forward.

    Args:
        mask: these phases.
        candidates: points that may be the peak, in order, each with its timeline.
    """

    mask: int
    candidates: Iterator[tuple[Timeline, Candidate]]

    def highest(self) -> tuple[Timeline, Highest]:
        """Return the peak (the first of equal ones) and its timeline."""
        sizes = ((timeline.bytes(moment), timeline, moment) for timeline, moment in self.candidates)
        total, timeline, moment = max(sizes, key=lambda each: each[0])
        return timeline, Highest(total, moment)


def moving_items(spec: Spec, stage: Stage, card: Card | None) -> list[Item]:
    """Return everything on a rank of a stage except model states."""
    items, around = standing(spec, stage, card)
    items += rollouts(spec, stage, card)
    highest: dict[Timeline, list[tuple[Highest, int]]] = {}
    for mask, timeline, moment in _peaks(spec, stage, card, around):
        highest.setdefault(timeline, []).append((moment, mask))
    for timeline, moments in highest.items():
        items += timeline.items(moments)
    return items


def peak_bytes(spec: Spec, stage: Stage, card: Card | None, *, tails: bool = True) -> int:
    """Return the peak allocated bytes of a rank, without the rows of the ledger.

    Args:
        spec: the run.
        stage: the pipeline stage of the rank.
        card: the GPU, for kernel workspaces that depend on it.
        tails: whether to add the unsplit remainders of model states. Without them the sum is the requested bytes
            rounded up to blocks: no run allocates less.
    """
    phases = run_phases(spec)
    totals = dict.fromkeys(phases, 0)
    for (phase, _), amount in state_sums(spec, stage, tails=tails).items():
        totals[phase] += amount
    items, around = standing(spec, stage, card)
    for item in [*items, *rollouts(spec, stage, card)]:
        for phase in phases_of(item.mask, phases):
            totals[phase] += item.count * item.block
    for mask, _, moment in _peaks(spec, stage, card, around):
        for phase in phases_of(mask, phases):
            totals[phase] += moment.bytes
    return max(totals.values())


def _peaks(spec: Spec, stage: Stage, card: Card | None, around: Around) -> list[tuple[int, Timeline, Highest]]:
    """Return each span's phases, its timeline and its peak; the bounds and the ledger of a run share them."""
    known = _known_peaks(spec)
    if (stage, card) not in known:
        known[stage, card] = [(span.mask, *span.highest()) for span in spans(spec, stage, card, around)]
    return known[stage, card]


@remembered
def _known_peaks(spec: Spec) -> dict[tuple[Stage, Card | None], list[tuple[int, Timeline, Highest]]]:  # noqa: ARG001
    """Return an empty table for the peaks of a run, the same one while the run is remembered."""
    return {}


def standing(spec: Spec, stage: Stage, card: Card | None) -> tuple[list[Item], Around]:
    """Return the persistent items other than model states, and the engine's per-layer buffers."""
    buffers = communication_buffers(spec, stage)
    items = [*buffers.steady, *standing_items(spec, stage, card), *first_workspace(spec, stage, card)]
    return items, buffers.around


def rollouts(spec: Spec, stage: Stage, card: Card | None) -> list[Item]:
    """What generation between steps holds on a stage, where the run generates."""
    if spec.training.completion_length is None:
        return []
    from memcalc.estimation.rollouts import rollout_items

    return list(rollout_items(spec, stage, card))


def spans(
    spec: Spec,
    stage: Stage,
    card: Card | None,
    around: Around,
    sizer_of: Callable[[Spec, Card | None], Sizer] = run_sizer,
) -> Iterator[Span]:
    """Yield the transient tensors of a stage, by groups of identical phases.

    Args:
        spec: the run.
        stage: the pipeline stage. Its chunks run sequentially, so the points of all chunks count.
        card: the GPU, for kernel workspaces that depend on it.
        around: the engine's per-layer buffers.
        sizer_of: returns the sizer of a run on a GPU.
    """
    sizer = sizer_of(spec, card)
    reference: tuple[tuple[Item, int], ...] = ()
    if scored_by_reference(spec):
        other = reference_run(spec)
        reference = reference_items(other, stage, sizer_of(other, card), around)
    kind = PlannedTimeline if has_segments(spec.training.recompute) else Timeline
    for exist, passes in passes_of(spec, stage, card):
        surroundings = beside(spec, around, exist=exist)
        timelines = [kind(spec, piece, sizer, *surroundings) for piece in pieces_of(spec, stage)]
        for each in passes:
            candidates = [(of, moment) for of in timelines for moment in of.candidates(each.stream, each.workspace)]
            if each.stream == "loss" and reference:
                candidates += [(of, of.after_loss(reference)) for of in timelines]
            yield Span(each.mask, iter(candidates))
    if spec.training.evaluation_batch_size is not None:
        run = evaluated(spec)
        evaluations = evaluation_timelines(run, stage, sizer_of(run, card), around)
        moments = [(of, each) for of in evaluations for stream in ("forward", "loss") for each in of.candidates(stream)]
        yield Span(mask_of(EVALUATION), iter(moments))
