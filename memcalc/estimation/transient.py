"""Transient tensors of both steps (activations, logits, gradients, temporaries), and their peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from memcalc.layout.spec_cache import cached_by_spec
from memcalc.layout.stages import Stage, one_in_flight
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Rows
from memcalc.ledger.row import Row
from memcalc.ledger.row_drafts import BIT, EVALUATION, RowDraft, mask_of, phases_of, run_phases
from memcalc.ledger.row_writer import write_rows
from memcalc.programs.sized_program import ProgramSizer, run_sizer
from memcalc.sharding.engines import ranks_that_may_hold_most
from memcalc.simulation.moments import BesideStates, moments_of
from memcalc.simulation.passes import first_workspace, passes_of, pieces_of
from memcalc.simulation.recorded_step import ChunkPasses, PassPeak, RecordedPasses, SizedStream, recorded_evaluation
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.spec import Spec
from memcalc.states.communication_buffers import communication_buffers
from memcalc.states.model_states import state_sums, state_totals
from memcalc.states.persistent import buffers_of_teacher, persistent_rows
from memcalc.states.upcast_weights import upcast_weights


class SharedPeakPhases(NamedTuple):
    """Phases that share one peak, for example the first and later steps' forward."""

    mask: int  # these phases
    # the requests of each chunk of the stage, and of each rank that may hold most; the chunks run sequentially
    recorded: list[RecordedPasses]
    phase: str  # the pass that the phases are
    first: bool  # whether it is the first backward of the run, which allocates cuBLAS's workspace

    def highest(self) -> PassPeak:
        """Return the peak (the first of equal ones)."""
        heights = self.heights() if len(self.recorded) > 1 else [0]
        highest = self.recorded[heights.index(max(heights))]
        return highest.peak(self.phase, self.mask, first=self.first)

    def heights(self) -> list[int]:
        """Return the bytes at the peak of each of the recorded passes."""
        alike: dict[SizedStream, list[RecordedPasses]] = {}
        for each in self.recorded:
            alike.setdefault(each.of, []).append(each)
        heights = {each: height for group in alike.values() for each, height in self._heights(group)}
        return [heights[each] for each in self.recorded]

    def _heights(self, alike: Sequence[RecordedPasses]) -> Iterator[tuple[RecordedPasses, int]]:
        """Yield the bytes at the peak of each of some passes, which differ only in what the stage holds beside them.

        Other micro-batches in flight are freed together, if at all. So a peak is the larger one of two: the highest
        point before that, with their bytes, and the highest one after it. The passes with the most in flight and those
        without any other micro-batch tell both.
        """

        def peak(passes: RecordedPasses) -> int:
            return passes.peak(self.phase, self.mask, first=self.first).peak.bytes

        most = max(alike, key=lambda each: each.in_flight_bytes)
        before = peak(most) - most.in_flight_bytes
        least = peak(alike[0].alone) if len(alike) > 1 else before
        for each in alike:
            yield each, max(before + each.in_flight_bytes, least) + each.beside_bytes(self.mask)


def transient_rows(spec: Spec, stage: Stage, gpu: GpuSpec | None, remainders: Mapping[str, int]) -> Rows:
    """Return everything on a rank of a stage except model states; the rows are written when first read.

    Args:
        spec: the run.
        stage: the pipeline stage of the rank.
        gpu: the GPU, for kernel workspaces that depend on it.
        remainders: unsplit remainders of blocks, in bytes by phase.
    """
    phases, held, passing = run_phases(spec), _held(spec, stage, gpu), _peaks(spec, stage, gpu)

    def write() -> list[Row]:
        items = [*held, *(draft for mask, peak in passing for draft in peak.drafts(mask))]
        return write_rows(items, "everything else", {BIT[phase]: size for phase, size in remainders.items()}, phases)

    return Rows(write, _totals(phases, held, passing, remainders))


PASSES = ("forward", "loss", "backward")  # the beginnings of their phases' names


def peak_bytes(
    spec: Spec, stage: Stage, gpu: GpuSpec | None, *, tails: bool = True, earlier_gradients: bool = True
) -> int:
    """Return the peak allocated bytes of a rank, without the rows of the ledger.

    Args:
        spec: the run.
        stage: the pipeline stage of the rank.
        gpu: the GPU, for kernel workspaces that depend on it.
        tails: whether to add the unsplit remainders of model states. Without them the sum is the requested bytes
            rounded up to blocks: no run allocates less.
        earlier_gradients: whether gradients of earlier micro-batches exist when most micro-batches are in flight.
    """
    states = state_totals(spec, stage, tails=tails)
    if not earlier_gradients:
        held = state_sums(spec, stage, tails=tails)
        gradients = {phase: size for (phase, component), size in held.items() if component is Component.GRADIENTS}
        states = {
            phase: size - gradients.get(phase, 0) if phase.startswith(PASSES) else size
            for phase, size in states.items()
        }
    return max(_totals(run_phases(spec), _held(spec, stage, gpu), _peaks(spec, stage, gpu), states).values())


def _totals(
    phases: tuple[str, ...],
    held: Iterable[RowDraft],
    passing: Iterable[tuple[int, PassPeak]],
    others: Mapping[str, int],
) -> dict[str, int]:
    """Return bytes by phase: of held tensors, of peaks with their phases' mask, and `others` by phase."""
    totals = {phase: others.get(phase, 0) for phase in phases}
    for item in held:
        for phase in phases_of(item.mask, phases):
            totals[phase] += item.count * item.block
    for mask, peak in passing:
        for phase in phases_of(mask, phases):
            totals[phase] += peak.bytes
    return totals


def _held(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> list[RowDraft]:
    """Return what a rank holds over whole phases, except model states."""
    return [*persistent_items(spec, stage, gpu), *rollouts(spec, stage, gpu)]


def _peaks(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> list[tuple[int, PassPeak]]:
    """Return each span's phases and its peak; the bounds and the ledger of a run share them."""
    known = _known_peaks(spec)
    if (stage, gpu) not in known:
        known[stage, gpu] = [(span.mask, span.highest()) for span in spans(spec, stage, gpu)]
    return known[stage, gpu]


@cached_by_spec
def _known_peaks(spec: Spec) -> dict[tuple[Stage, GpuSpec | None], list[tuple[int, PassPeak]]]:  # noqa: ARG001
    """Return an empty table for the peaks of a run, the same one while the run is remembered."""
    return {}


def persistent_items(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> list[RowDraft]:
    """Return the persistent items other than model states."""
    held = (*persistent_rows(spec, stage, gpu), *buffers_of_teacher(spec))
    persistent = (*held, *first_workspace(spec, stage, gpu))
    return [*communication_buffers(spec, stage), *upcast_weights(spec, stage), *persistent]


def rollouts(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> list[RowDraft]:
    """Return the tensors of generation between steps on a stage, if the run generates."""
    if spec.training.completion_length is None:
        return []
    from memcalc.generation.rollouts import rollout_items

    return list(rollout_items(spec, stage, gpu))


def spans(
    spec: Spec,
    stage: Stage,
    gpu: GpuSpec | None,
    sizer: Callable[[Spec, GpuSpec | None], ProgramSizer] = run_sizer,
) -> Iterator[SharedPeakPhases]:
    """Yield the transient tensors of a stage, by groups of identical phases.

    Args:
        spec: the run.
        stage: the pipeline stage.
        gpu: the GPU, for kernel workspaces that depend on it.
        sizer: returns the sizer of a run on a GPU.
    """
    own = sizer(spec, gpu)

    def sizer_of(run: Spec) -> ProgramSizer:
        return own if run is spec else sizer(run, gpu)

    moments, ranks = moments_of(spec, stage), ranks_that_may_hold_most(spec)
    beside = BesideStates(spec, stage, own)
    for exist, passes in passes_of(spec, stage, gpu):
        workspace = next((each.workspace for each in passes if each.workspace is not None), None)
        chunks: dict[Stage, ChunkPasses] = {}
        recorded: list[RecordedPasses] = []
        for moment in moments:
            known = one_in_flight(moment.chunk)
            if known not in chunks:
                chunks[known] = ChunkPasses(spec, moment.chunk, sizer_of, workspace)
            recorded += [
                chunks[known].step(
                    moment.chunk,
                    exist=exist or moment.is_made,
                    after_forward=moment.after_forward,
                    rank=rank,
                    beside=(beside, moment),
                )
                for rank in ranks
            ]
        for each in passes:
            yield SharedPeakPhases(each.mask, recorded, each.stream, each.workspace is not None)
    if spec.training.evaluation_batch_size is not None:
        evaluations = [recorded_evaluation(spec, piece, sizer_of) for piece in pieces_of(spec, stage)]
        yield SharedPeakPhases(mask_of(EVALUATION), evaluations, EVALUATION, first=False)
