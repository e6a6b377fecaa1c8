"""A measurement as the result type of all commands: the recorded ledger, reconciled with the device's counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger, Rows
from memcalc.ledger.result import DeviceMemory, OutsideMemory, RankResult, Result, known
from memcalc.ledger.row import Row
from memcalc.ledger.textbook import textbook
from memcalc.ledger.verdict import observed
from memcalc.measuring.measurement import OUT_OF_MEMORY, MeasuredDevice, MeasuredPhase, Measurement
from memcalc.recorder.ledger import traced_ledger
from memcalc.recorder.recording import Recording
from memcalc.recorder.run_analysis import RunAnalysis, judge
from memcalc.spec.hardware.gpus import GpuSpec, all_gpus, find_gpu
from memcalc.spec.untraced_features import not_run

CITATION = "measured"


def analyze(measurement: Measurement) -> RunAnalysis:
    """Return the events of a run, summed and replayed under the rules of its PyTorch version."""
    on_cuda = measurement.device.kind != "cpu"
    recording = Recording(
        device=measurement.device.identifier,
        events=measurement.events,
        parameters=measurement.parameters,
        trainable=measurement.trainable,
        buffers=measurement.buffers,
        reserved_bytes=_most(phase.peak_reserved_bytes for phase in measurement.phases),
        has_allocator=on_cuda,
    )
    # No GPU is given: a measured run has been checked against a real one.
    return judge(recording, None, allocator_conf(measurement.allocator), measurement.versions["torch"])


def allocator_conf(settings: str) -> str:
    """Return the value of PYTORCH_CUDA_ALLOC_CONF in settings as they would be typed."""
    found = dict(word.partition("=")[::2] for word in settings.split())
    return found.get("PYTORCH_CUDA_ALLOC_CONF") or found.get("PYTORCH_ALLOC_CONF") or ""


def to_result(measurement: Measurement) -> Result:
    """Return the result of a measurement; each phase of its ledger sums to the measured peak."""
    phases = measurement.phases
    ledger = measured_ledger(measurement.analysis, phases)
    allocated = ledger.peak_bytes
    reserved = _most(phase.peak_reserved_bytes for phase in phases)
    on_device = _most(phase.device_bytes for phase in phases)
    outside = OutsideMemory(
        cached_segments=0 if reserved is None else reserved - allocated,
        device_context=0 if reserved is None or on_device is None else on_device - reserved,
        communication_library=0,
    )
    gpu = gpu_of(measurement)
    notes = list(outside_notes(measurement))
    if measurement.outcome == OUT_OF_MEMORY:
        notes.append("The run ran out of memory: later phases are missing.")
    limits = not_run(measurement.spec)
    return Result(
        source="measure",
        device=measurement.device.identifier,
        spec=measurement.spec,
        parameters=measurement.parameters,
        trainable_parameters=measurement.trainable,
        buffer_elements=measurement.buffers,
        textbook=textbook(measurement.spec),
        ranks=(RankResult({"pipeline_stage": 0}, ledger, known(DeviceMemory(reserved, on_device, outside))),),
        confidence="measured",
        gpu=gpu,
        limits=limits,
        notes=tuple(notes),
        judgement=None
        if gpu is None or on_device is None
        else observed(measurement.outcome != OUT_OF_MEMORY, on_device, gpu.usable_bytes, limits),
    )


def gpu_of(measurement: Measurement) -> GpuSpec | None:
    """Return the GPU of a measurement if the table has it; for a CPU, the GPU of the configuration."""
    if measurement.device.kind != "cpu":
        return gpu_named(measurement.device)
    return measurement.spec.gpu


def gpu_named(device: MeasuredDevice) -> GpuSpec | None:
    """Return the GPU of a device if the table has it."""
    if device.kind == "null cuda":
        return find_gpu(device.identifier.partition(":")[2])
    return next((gpu for gpu in all_gpus() if gpu.device_name == device.name), None)


def measured_ledger(recorded: RunAnalysis, phases: Sequence[MeasuredPhase]) -> Ledger:
    """Return the recorded rows, plus the bytes that the device counted beyond them in each phase.

    On CUDA the record is the allocator's own, so the rest is allocated minus requested bytes. The point of a peak comes
    from a replay if that agrees with the counters, else from the requested bytes.
    """
    ledger = recorded.ledger
    if all(ledger.totals.get(phase.name) == phase.peak_allocated_bytes for phase in phases):
        return ledger
    on_cuda = recorded.recording.has_allocator
    plain = traced_ledger(recorded.timeline) if on_cuda else ledger
    rest = [row for phase in phases for row in _rest(phase, plain.totals.get(phase.name, 0), on_cuda=on_cuda)]
    names = tuple(phase.name for phase in phases)
    return Ledger([*plain.groups, Rows(row for row in rest if row.bytes)], names)


def _rest(phase: MeasuredPhase, recorded: int, *, on_cuda: bool) -> Iterator[Row]:
    """Yield rows for the bytes that the device counted beyond the record in one phase."""
    size = phase.peak_allocated_bytes - recorded
    if on_cuda:
        yield _row(phase, Component.BLOCK_ROUNDING, "rounding and unsplit remainders", size)
    elif phase.inside and sum(phase.inside.values()) == size:
        for operator, inside in phase.inside.items():
            yield _row(phase, Component.TEMPORARIES, f"inside {operator}", inside)
    else:  # this peak is not the record's peak
        yield _row(phase, Component.TEMPORARIES, "inside operators", size)


def _row(phase: MeasuredPhase, component: Component, what: str, size: int) -> Row:
    return Row(component, "allocator", what, (size,), "uint8", 1, size, (phase.name,), "measured", CITATION)


def outside_notes(measurement: Measurement) -> Iterable[str]:
    """Yield one sentence on the memory outside the PyTorch allocator, by part."""
    from memcalc.units import format_bytes

    device = measurement.device
    if device.context_bytes is None:
        return
    reserved = [phase.reserved_bytes or 0 for phase in measurement.phases]
    used = [phase.device_bytes or 0 for phase in measurement.phases]
    libraries = max((use - held - device.context_bytes for use, held in zip(used, reserved, strict=True)), default=0)
    parts = [
        f"{format_bytes(device.context_bytes, 'MiB')} CUDA context",
        f"{format_bytes(libraries, 'MiB')} libraries and kernels loaded later",
    ]
    if device.others_bytes is not None:
        parts.append(f"{format_bytes(device.others_bytes, 'MiB')} in use by other processes before the run")
    yield f"Outside PyTorch's allocator: {', '.join(parts)} (reported by {device.source})."


def _most(values: Iterable[int | None]) -> int | None:
    """Return the largest value; None if the device has no such figure."""
    known = [value for value in values if value is not None]
    return max(known, default=None)
