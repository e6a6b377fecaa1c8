"""The memory curve behind a verdict: the run's requests, replayed as for the verdict."""

from __future__ import annotations

from memcalc.errors import InputError, OutOfMemory
from memcalc.estimation.outside_allocator import outside_bytes
from memcalc.events.memory_curve import MemoryCurve
from memcalc.layout.stages import stages_of
from memcalc.ledger.result import RankResult
from memcalc.sharding.engines import ranks_to_replay
from memcalc.simulation.simulated_run import run_requests, unsupported_reason
from memcalc.spec.model_families.transformers_fallback import reject_without_formulas
from memcalc.spec.spec import Spec
from memcalc.stream.memory_curve import memory_curve


def timeline_of(spec: Spec, rank: RankResult | None = None) -> MemoryCurve:
    """Return the memory curve of three steps of a rank on the GPU of the run, after every request.

    Where the ranks of a stage make different requests, the curve is that of the rank that reserves most.

    On a GPU that the run fills, the allocator frees cached blocks; a run that does not fit is replayed without a limit.

    Args:
        spec: the run.
        rank: the rank: its pipeline stage, and its device memory if a replay has found it; then a GPU with less is not
            tried. None: the first stage.

    Raises:
        InputError: the order of the run's requests is not modelled, or there are no formulas for its family.
    """
    reject_without_formulas(spec)
    why = unsupported_reason(spec)
    if why:
        raise InputError(f"memory over the run cannot be shown: {why}.", "`memcalc trace` runs the step without a GPU.")
    gpu = spec.gpu
    capacity = None if gpu is None else gpu.usable_bytes
    stage = stages_of(spec)[0 if rank is None else rank.rank.get("pipeline_stage", 0)]
    room = None if gpu is None else gpu.usable_bytes - outside_bytes(spec, gpu, stage)
    device_bytes = None if rank is None else rank.device_bytes
    training = spec.training
    torch = training.torch_version.removeprefix("v")
    holds = gpu is None or device_bytes is None or device_bytes <= gpu.usable_bytes
    curves = []
    for data_parallel_rank in ranks_to_replay(spec):
        requests = run_requests(spec, stage, data_parallel_rank)
        try:
            curves.append(memory_curve(requests, training.alloc_conf, torch, room if holds else None, capacity))
        except OutOfMemory:
            curves.append(memory_curve(requests, training.alloc_conf, torch, None, capacity))
    found = max(curves, key=lambda curve: max(curve.reserved or (), default=0))
    return MemoryCurve(found.timeline, found.allocated, found.reserved, room)
