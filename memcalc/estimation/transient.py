"""Transient tensors of both steps (activations, logits, gradients, temporaries), and their peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from memcalc.estimation.evaluation import (
    evaluated,
    evaluation_timelines,
    reference_items,
    reference_run,
    scored_by_reference,
)
from memcalc.layout.spec_cache import cached_by_spec
from memcalc.layout.stages import Stage
from memcalc.ledger.row_drafts import EVALUATION, RowDraft, mask_of, phases_of, run_phases
from memcalc.phase_peaks.communication_buffers import communication_buffers
from memcalc.phase_peaks.layer_buffers import PerLayerBuffers
from memcalc.phase_peaks.passes import beside, first_workspace, passes_of, pieces_of
from memcalc.phase_peaks.peak_candidates import PeakCandidate, TransientPeak
from memcalc.phase_peaks.recompute_timeline import RecomputeTimeline
from memcalc.phase_peaks.timeline import StageTimeline
from memcalc.programs.sized_program import ProgramSizer, run_sizer
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.recompute_plan import has_segments
from memcalc.spec.spec import Spec
from memcalc.states.model_states import state_sums
from memcalc.states.persistent import persistent_rows


class SharedPeakPhases(NamedTuple):
    """Phases that share one peak, for example the first and later steps' forward.

    Args:
        mask: these phases.
        candidates: points that may be the peak, in order, each with its timeline.
    """

    mask: int
    candidates: Iterator[tuple[StageTimeline, PeakCandidate]]

    def highest(self) -> tuple[StageTimeline, TransientPeak]:
        """Return the peak (the first of equal ones) and its timeline."""
        sizes = ((timeline.bytes(moment), timeline, moment) for timeline, moment in self.candidates)
        total, timeline, moment = max(sizes, key=lambda each: each[0])
        return timeline, TransientPeak(total, moment)


def transient_rows(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> list[RowDraft]:
    """Return everything on a rank of a stage except model states."""
    items, around = persistent_items(spec, stage, gpu)
    items += rollouts(spec, stage, gpu)
    highest: dict[StageTimeline, list[tuple[TransientPeak, int]]] = {}
    for mask, timeline, moment in _peaks(spec, stage, gpu, around):
        highest.setdefault(timeline, []).append((moment, mask))
    for timeline, moments in highest.items():
        items += timeline.items(moments)
    return items


def peak_bytes(spec: Spec, stage: Stage, gpu: GpuSpec | None, *, tails: bool = True) -> int:
    """Return the peak allocated bytes of a rank, without the rows of the ledger.

    Args:
        spec: the run.
        stage: the pipeline stage of the rank.
        gpu: the GPU, for kernel workspaces that depend on it.
        tails: whether to add the unsplit remainders of model states. Without them the sum is the requested bytes
            rounded up to blocks: no run allocates less.
    """
    phases = run_phases(spec)
    totals = dict.fromkeys(phases, 0)
    for (phase, _), amount in state_sums(spec, stage, tails=tails).items():
        totals[phase] += amount
    items, around = persistent_items(spec, stage, gpu)
    for item in [*items, *rollouts(spec, stage, gpu)]:
        for phase in phases_of(item.mask, phases):
            totals[phase] += item.count * item.block
    for mask, _, moment in _peaks(spec, stage, gpu, around):
        for phase in phases_of(mask, phases):
            totals[phase] += moment.bytes
    return max(totals.values())


def _peaks(
    spec: Spec, stage: Stage, gpu: GpuSpec | None, layer_buffers: PerLayerBuffers
) -> list[tuple[int, StageTimeline, TransientPeak]]:
    """Return each span's phases, its timeline and its peak; the bounds and the ledger of a run share them."""
    known = _known_peaks(spec)
    if (stage, gpu) not in known:
        known[stage, gpu] = [(span.mask, *span.highest()) for span in spans(spec, stage, gpu, layer_buffers)]
    return known[stage, gpu]


@cached_by_spec
def _known_peaks(spec: Spec) -> dict[tuple[Stage, GpuSpec | None], list[tuple[int, StageTimeline, TransientPeak]]]:  # noqa: ARG001
    """Return an empty table for the peaks of a run, the same one while the run is remembered."""
    return {}


def persistent_items(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> tuple[list[RowDraft], PerLayerBuffers]:
    """Return the persistent items other than model states, and the engine's per-layer buffers."""
    buffers = communication_buffers(spec, stage)
    items = [*buffers.steady, *persistent_rows(spec, stage, gpu), *first_workspace(spec, stage, gpu)]
    return items, buffers.around


def rollouts(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> list[RowDraft]:
    """What generation between steps holds on a stage, where the run generates."""
    if spec.training.completion_length is None:
        return []
    from memcalc.estimation.rollouts import rollout_items

    return list(rollout_items(spec, stage, gpu))


def spans(
    spec: Spec,
    stage: Stage,
    gpu: GpuSpec | None,
    layer_buffers: PerLayerBuffers,
    sizer_of: Callable[[Spec, GpuSpec | None], ProgramSizer] = run_sizer,
) -> Iterator[SharedPeakPhases]:
    """Yield the transient tensors of a stage, by groups of identical phases.

    Args:
        spec: the run.
        stage: the pipeline stage. Its chunks run sequentially, so the points of all chunks count.
        gpu: the GPU, for kernel workspaces that depend on it.
        layer_buffers: the engine's per-layer buffers.
        sizer_of: returns the sizer of a run on a GPU.
    """
    sizer = sizer_of(spec, gpu)
    reference: tuple[tuple[RowDraft, int], ...] = ()
    if scored_by_reference(spec):
        other = reference_run(spec)
        reference = reference_items(other, stage, sizer_of(other, gpu), layer_buffers)
    kind = RecomputeTimeline if has_segments(spec.training.recompute) else StageTimeline
    for exist, passes in passes_of(spec, stage, gpu):
        surroundings = beside(spec, layer_buffers, exist=exist)
        timelines = [kind(spec, piece, sizer, *surroundings) for piece in pieces_of(spec, stage)]
        for each in passes:
            candidates = [(of, moment) for of in timelines for moment in of.candidates(each.stream, each.workspace)]
            if each.stream == "loss" and reference:
                candidates += [(of, of.after_loss(reference)) for of in timelines]
            yield SharedPeakPhases(each.mask, iter(candidates))
    if spec.training.evaluation_batch_size is not None:
        run = evaluated(spec)
        evaluations = evaluation_timelines(run, stage, sizer_of(run, gpu), layer_buffers)
        moments = [(of, each) for of in evaluations for stream in ("forward", "loss") for each in of.candidates(stream)]
        yield SharedPeakPhases(mask_of(EVALUATION), iter(moments))
