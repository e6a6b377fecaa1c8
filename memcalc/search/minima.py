"""The fewest GPUs, the smallest GPU and the least recomputation with which a run fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.layout.stages import stages_of
from memcalc.ledger.component import Component
from memcalc.ledger.verdict import Verdict
from memcalc.progress import Progress, silent
from memcalc.search.boundary_search import fit_boundary
from memcalc.search.layouts import Space
from memcalc.search.ranking import Failing, some_layout_fits
from memcalc.search.variants import Reader, varied, violated_rule
from memcalc.spec.hardware.gpus import GpuSpec, all_gpus
from memcalc.spec.hardware.interconnect import System
from memcalc.spec.hardware.kernels import missing_units
from memcalc.spec.spec import Spec
from memcalc.suggestions.run_overrides import as_is
from memcalc.verdict.judge import judge

MINIMA = ("gpus", "gpu_kind", "recompute", "cost")

MOST_GPUS = 4096  # default limit of a search

ONE_GPU = {
    "data_parallel": 1,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "context_parallel": 1,
    "expert_parallel": 1,
    "data_parallel_replicate": 1,
    "sequence_parallel": False,
    "schedule": "1f1b",
    "virtual_stages": 1,
}


class GpuVerdict(NamedTuple):
    """The verdict of the run on one GPU."""

    gpu: GpuSpec  # the GPU
    verdict: Verdict  # of the run on it
    lacks: str  # features that the run needs and the GPU lacks, as text; "": none

    @property
    def device_bytes(self) -> int:
        """Memory of the run on this GPU; a lower bound if bounds decided."""
        return self.verdict.needed_bytes

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return self.verdict.answer == "fits"

    @property
    def suffices(self) -> bool:
        """Whether the run fits and the GPU has the required features."""
        return self.fits and not self.lacks


class FewestGpus(NamedTuple):
    """The fewest GPUs."""

    gpus: int | None  # on which some layout fits for sure; None: no number tried is enough
    may_be_fewer: bool  # whether a layout over fewer GPUs may fit


class LeastRecompute(NamedTuple):
    """The least recomputation that fits."""

    recompute: str | tuple[int, ...]  # as in a configuration
    layers: int  # recomputed layers per stage (per chunk of layers, if a stage has several)
    of: int  # layers of the stage or chunk
    device_bytes: int  # device memory of a GPU


def fewest_gpus(
    spec: Spec,
    gpu: GpuSpec,
    system: System,
    sequences: int | None,
    fixed_fields: frozenset[str],
    most: int = MOST_GPUS,
    *,
    progress: Progress = silent,
    as_read: Reader = as_is,
) -> FewestGpus:
    """Return the fewest GPUs up to `most` on which some layout fits.

    Candidates are numbers up to a node, then whole nodes, and `most`, except numbers of GPUs that together cannot hold
    weights, master weights and optimizer state once. Doubling numbers are tried first, to find one that is enough. The
    numbers below it follow in decreasing order: a split that fails with many replicas need not be estimated with fewer.

    Args:
        spec: the run.
        gpu: the GPU.
        system: the node and network.
        sequences: per optimizer step; None: the run's micro-batch on every GPU.
        fixed_fields: fields that keep the run's own value.
        most: the largest number to try.
        progress: called with the number of GPUs tried, and the number of layouts done.
        as_read: returns a variant as the run's file is read.
    """
    failing: Failing = {}
    least = -(-resident_bytes(spec) // gpu.usable_bytes)

    undecided = False

    def fits(gpus: int) -> bool:
        nonlocal undecided
        batch = sequences or gpus * spec.training.micro_batch_size
        space = Space(spec, gpus, system.node, batch, fixed_fields)
        answer = some_layout_fits(space, system, spec, fixed_fields, failing, progress, as_read=as_read)
        undecided = undecided or answer == "unknown"
        return answer == "fits"

    counts = [gpus for gpus in node_counts(system.node, most) if gpus >= least]
    coarse: list[int] = []  # each at least twice the one before, and the last
    for gpus in counts:
        if not coarse or gpus >= 2 * coarse[-1] or gpus == counts[-1]:
            coarse.append(gpus)
    enough = next(filter(fits, coarse), None)
    rest = [gpus for gpus in reversed(counts) if gpus not in coarse and (enough is None or gpus < enough)]
    return FewestGpus(min(filter(fits, rest), default=enough), undecided)


def node_counts(node: int, most: int = MOST_GPUS) -> Iterator[int]:
    """Yield 1, 2, ... up to a node, then whole nodes: 16, 24, 32, ...; finally `most`."""
    yield from range(1, min(node, most) + 1)
    yield from range(2 * node, most + 1, node)
    if most > node and most % node:
        yield most


def resident_bytes(spec: Spec) -> int:
    """Return weights, master weights and optimizer state, each once: a lower bound for all ranks together."""
    one = varied(
        spec,
        parallelism={**ONE_GPU, "zero_stage": 0, "engine": "ddp"},
        training={"micro_batch_size": 1, "gradient_accumulation_steps": 1, "global_batch_size": None},
    )
    fixed_fields = estimate(one).ledger.components("zero_grad_2")
    return sum(
        fixed_fields.get(part, 0) for part in (Component.WEIGHTS, Component.MASTER_WEIGHTS, Component.OPTIMIZER_STATE)
    )


def gpu_verdicts(spec: Spec, vendor: str, as_read: Reader = as_is) -> list[GpuVerdict]:
    """Return what the run needs on every GPU of a vendor, the smallest first."""
    found = []
    for gpu in sorted(all_gpus(), key=lambda gpu: (gpu.usable_bytes, gpu.name)):
        if gpu.vendor == vendor:
            run = varied(spec, hardware={"gpu": gpu.name})
            lacks = lacking(run, gpu)
            found.append(GpuVerdict(gpu, judge(run if lacks else as_read(run)), lacks))
    return found


def lacking(spec: Spec, gpu: GpuSpec) -> str:
    """Return what a GPU lacks for the run: matrix units for a dtype, a kernel, or a requirement of a rule."""
    lacks = missing_units(spec.training.dtype, spec.training.attention, gpu)
    violation = violated_rule(spec)
    if violation is not None:
        lacks.append(violation.problem)
    return "; ".join(lacks)


def least_recompute(spec: Spec, as_read: Reader = as_is) -> LeastRecompute | None:
    """Return none, else attention alone (if its kernel saves the scores), else the fewest layers per stage that fit.

    Everything else stays unchanged. None: full recomputation is not enough.
    """
    chunks = [piece for stage in stages_of(spec) for piece in stage.chunks]
    most = max(piece.stop - piece.first for piece in chunks)

    def run(recompute: str | tuple[int, ...]) -> Spec:
        return as_read(varied(spec, training={"recompute": recompute}))

    def plan(layers: int) -> str | tuple[int, ...]:
        if layers in (0, most):
            return "full" if layers else "none"
        return tuple(layer for piece in chunks for layer in range(piece.first, min(piece.first + layers, piece.stop)))

    def fits(recompute: str | tuple[int, ...]) -> bool:
        try:
            return judge(run(recompute)).answer == "fits"
        except InputError:  # the run's program has no such recomputation
            return False

    def needed(recompute: str | tuple[int, ...]) -> int:
        return judge(run(recompute)).needed_bytes

    if spec.training.attention == "eager" and not fits("none") and fits("selective"):
        return LeastRecompute("selective", 0, most, needed("selective"))
    numbers = range(1, most + 2)  # layers without recomputation, plus one
    # Starts without recomputation and halves: each number is a replay, which takes seconds for many layers.
    kept = fit_boundary(numbers, lambda layers: fits(plan(most + 1 - layers)), start=most, step=max(1, most // 2)).value
    if kept == 0:
        return None
    layers = most + 1 - kept
    return LeastRecompute(plan(layers), layers, most, needed(plan(layers)))
