"""Measurement of one run, with a preflight check, and an explanation if it runs out of memory."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memcalc.allocator import replay
from memcalc.diagnosis.diagnosis import diagnose
from memcalc.errors import MemcalcError, Unavailable
from memcalc.estimation.estimate import estimate
from memcalc.events.event import EventType
from memcalc.measuring.measure import MeasurementOutOfMemory, measure
from memcalc.measuring.measurement import MeasuredDevice, Measurement
from memcalc.measuring.ranks import RankPlace, device_of_rank, measure_rank, refuse_other_ranks
from memcalc.measuring.records import RECORDS
from memcalc.measuring.result import allocator_conf
from memcalc.spec.rule_sets.inference import of_training
from memcalc.spec.spec import Spec
from memcalc.step.packages import require
from memcalc.suggestions.run_overrides import written_out
from memcalc.units import format_bytes
from memcalc.validation.predicted_vs_measured import predicted_spec
from memcalc.validation.workers import worker_for


@dataclass(frozen=True)
class MeasureOptions:
    """Options of a measurement."""

    device: str | None = None  # "cuda", "cuda:1", "cpu", or "null:<gpu>"; None: the GPU
    steps: int = 3  # optimizer steps
    record: str | Path | None = None  # file that the record is appended to
    alloc_conf: str = ""  # PYTORCH_CUDA_ALLOC_CONF of the run; "": as in the environment
    python: str | None = None  # for a null device, an interpreter with a CUDA build of torch
    headroom: bool = False  # reject a run if its estimate exceeds the device's memory
    force: bool = False  # run it nevertheless, also on a busy device
    warn: Callable[[str], None] | None = None  # called with the reason that `force` overrides


def measure_run(spec: Spec, options: MeasureOptions) -> Measurement:
    """Measure a run in a separate process.

    Raises:
        Unavailable: a requirement is missing or busy; or `headroom` is set and the run cannot fit.
        InputError: the step cannot run the spec.
        OutOfMemory: the run ran out of memory; the message has the simulated allocator's result and changes that fit.
        NotKept: the record could not be written.
    """
    of_training(spec, "measure")
    if options.record is not None:
        RECORDS.check(Path(options.record))
    if options.device is None or not options.device.startswith("null"):
        require("measure", spec)
    with worker_for(options.device, options.python) as (worker, device):
        if options.headroom:
            _look_ahead(spec, worker.describe(device)[0], options)
        try:
            return measure(
                spec,
                device,
                options.steps,
                options.record,
                worker=worker,
                alloc_conf=options.alloc_conf,
                force=options.force,
                weight_bytes=0 if options.force or device == "cpu" else weight_bytes(spec),
            )
        except MeasurementOutOfMemory as error:
            raise _explained(error) from error


def measure_one_rank(
    spec: Spec, options: MeasureOptions, here: RankPlace
) -> tuple[Measurement, tuple[dict[str, Any], ...]]:
    """Measure this rank of several, in this process, and gather the records of all ranks.

    Raises:
        Unavailable, InputError, OutOfMemory: see `measure_run`.
    """
    of_training(spec, "measure")
    if options.record is not None:
        RECORDS.check(Path(options.record))
    device = device_of_rank(options.device, here)
    refuse_other_ranks(spec, here.ranks)
    require("measure", spec)
    if options.headroom:
        from memcalc.measuring.run_process import describe_found_device

        _look_ahead(spec, describe_found_device(device), options)
    try:
        return measure_rank(
            spec, here, device, options.steps, options.record, alloc_conf=options.alloc_conf, force=options.force
        )
    except MeasurementOutOfMemory as error:
        raise _explained(error) from error


def _explained(error: MeasurementOutOfMemory) -> MeasurementOutOfMemory:
    """Return the error with the simulated allocator's result appended."""
    return MeasurementOutOfMemory(f"{error}\n{opinion(error.measurement)}".rstrip(), error.measurement)


def _look_ahead(spec: Spec, device: MeasuredDevice, options: MeasureOptions) -> None:
    """Reject a run that cannot fit, or warn about it if forced."""
    if not options.force:
        check_fits(spec, device)
    elif options.warn is not None and (found := warning(spec, device)) is not None:
        options.warn(found)


MOST_CHANGES = 3


def opinion(measurement: Measurement) -> str:
    """Return the simulated allocator's result in a sentence, then the cheapest changes that fit; "" for a CPU."""
    return " ".join(part for part in (simulated(measurement), fitting(measurement)) if part)


def simulated(measurement: Measurement) -> str:
    """Return whether the simulated PyTorch allocator fails at the same request on the same device, as a sentence."""
    device = measurement.device
    if device.total_bytes is None or not any(event.kind is EventType.OOM for event in measurement.events):
        return ""
    gone = (device.others_bytes or 0) + (device.context_bytes or 0)
    found = replay(
        measurement.events,
        allocator_conf(measurement.allocator),
        measurement.versions["torch"],
        device.total_bytes,
        used=gone,
    )
    if found.failure is None:
        return (
            "The simulated allocator would have served every request "
            f"({format_bytes(found.peak_reserved, 'GiB')} reserved at most): memory outside PyTorch caused the failure."
        )
    event = measurement.events[found.failure.event]
    if event.kind is EventType.OOM:
        return f"The simulated allocator fails at the same request, of {format_bytes(event.bytes, 'MiB')}."
    where = f"{event.phase}, at {event.operator}" + (f" of {event.module}" if event.module else "")
    return f"The simulated allocator fails earlier, in {where}."


def fitting(measurement: Measurement) -> str:
    """Return changes that would have fitted, as a sentence, by the estimate scaled to the run's allocated bytes."""
    message = (measurement.message or "").encode()
    try:
        explained = diagnose("the run", io.BytesIO(message), written_out(predicted_spec(measurement))).explained
    except MemcalcError:  # the message has no figures, or the run has no formulas
        return ""
    if explained is None:
        return ""
    changes = [change for change in explained.changes if change.fits][:MOST_CHANGES]
    if not changes:
        return "No single change that memcalc knows makes it fit."
    words = [
        f"{' '.join(f'--set {override}' for override in change.overrides)} ({format_bytes(change.needed, 'GiB')})"
        for change in changes
    ]
    return f"Would have fitted: {'; or '.join(words)}."


BEFORE_THE_FIRST_STEP = "zero_grad_1"


def weight_bytes(spec: Spec) -> int:
    """Return the estimated bytes of model, optimizer and inputs before the first step; 0 if unknown."""
    try:
        return estimate(spec).ledger.totals[BEFORE_THE_FIRST_STEP]
    except MemcalcError:
        return 0


def warning(spec: Spec, device: MeasuredDevice) -> str | None:
    """Return one sentence if the estimate exceeds the device's memory; None if it fits or is unknown.

    Args:
        spec: the run.
        device: as returned by `memcalc.measuring.client.Worker.describe`.
    """
    total = host_bytes() if device.kind == "cpu" else device.total_bytes
    try:
        needed = estimate(spec).ledger.peak_bytes
    except MemcalcError:
        return None
    if total is None or needed <= total:
        return None
    return (
        f"{spec.name} cannot fit {device.identifier}: the estimate is {format_bytes(needed, 'GiB')} allocated at the "
        f"peak, and the device has {format_bytes(total, 'GiB')}."
    )


def check_fits(spec: Spec, device: MeasuredDevice) -> None:
    """Reject a run if its estimate exceeds the device's memory.

    Raises:
        Unavailable: it does.
    """
    found = warning(spec, device)
    if found is not None:
        raise Unavailable(f"{found} Override with --force.")


def host_bytes() -> int | None:
    """Return the free host memory in bytes; None if the system does not report it."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
