"""The command `measure`: run the training step on a real device and record its memory."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memcalc.errors import NotWritten, OutOfMemory, Unavailable
from memcalc.events import read_events
from memcalc.events.files import event_from
from memcalc.measuring.client import Worker
from memcalc.measuring.job import Job
from memcalc.measuring.measurement import OUT_OF_MEMORY, MeasuredDevice, Measurement, phase_from
from memcalc.measuring.records import RECORDS
from memcalc.spec.spec import Spec
from memcalc.step.packages import require
from memcalc.text import masked

ADVICE = " If reserved but unallocated"  # generic advice that follows the figures in PyTorch's message


class MeasurementOutOfMemory(OutOfMemory):
    """A measured run ran out of memory; the figures up to that point are attached."""

    def __init__(self, text: str, measurement: Measurement) -> None:
        super().__init__(text)
        self.measurement = measurement


class RecordNotWritten(Unavailable):
    """The record of a measured run could not be written; the measurement is attached."""

    def __init__(self, text: str, measurement: Measurement) -> None:
        super().__init__(text)
        self.measurement = measurement


def measure(
    spec: Spec,
    device: str | None = None,
    steps: int = 3,
    record: str | Path | None = None,
    *,
    command: str | None = None,
    worker: Worker | None = None,
    alloc_conf: str = "",
    force: bool = False,
    weight_bytes: int = 0,
) -> Measurement:
    """Return the memory of a device by phase while it runs `steps` training steps in a separate process.

    Args:
        spec: the run to measure.
        device: "cuda", "cuda:1" or "cpu"; None: the GPU.
        steps: optimizer steps. The first one creates the optimizer states; the second is already the steady state.
        record: file that the record is appended to, also if the run runs out of memory.
        command: the command in the record; None: that of this process.
        worker: the process to use; None: a new one under this Python.
        alloc_conf: PYTORCH_CUDA_ALLOC_CONF of the run; "": as in the environment.
        force: run on a device that is busy, or too small for the weights alone.
        weight_bytes: estimated bytes before the first step; 0: unknown.

    Raises:
        Unavailable: torch, transformers or a GPU is missing, or the GPU is busy.
        InputError: the step cannot run the spec, or the device has no kernel for it.
        RanOut: the device ran out of memory. The record up to that point has been kept.
        NotKept: the record could not be written.
    """
    if record is not None:
        RECORDS.check(Path(record))
    if worker is None:
        require("measure", spec)
        with Worker() as own:
            return measure(
                spec,
                device,
                steps,
                record,
                command=command,
                worker=own,
                alloc_conf=alloc_conf,
                force=force,
                weight_bytes=weight_bytes,
            )
    job = Job(spec, steps, device, alloc_conf, worker.events, force, weight_bytes)
    measurement = measured(job, worker.run(job), typed() if command is None else command)
    append_record(measurement, record)
    return measurement


def append_record(measurement: Measurement, record: str | Path | None) -> None:
    """Append a measurement to a file of records, if given, and reject a run that ran out of memory.

    Raises:
        NotKept: the record could not be written.
        RanOut: the run ran out of memory.
    """
    unkept = None if record is None else unwritten((measurement.to_record(),), record)
    try:
        refuse_death(measurement, None if unkept else record)
    except MeasurementOutOfMemory as error:
        if unkept is None:
            raise
        raise RecordNotWritten(f"{error}\n{unkept}", measurement) from None
    if unkept is not None:
        raise RecordNotWritten(str(unkept), measurement)


def unwritten(records: Iterable[dict[str, Any]], file: str | Path) -> NotWritten | None:
    """Append records to a file. A failure is returned, not raised, so that the result is still shown."""
    try:
        RECORDS.append(records, Path(file))
    except NotWritten as error:
        return error
    return None


def measured(job: Job, answer: dict[str, Any], command: str) -> Measurement:
    """Return the measurement of a process's answer, with the events in the job's file.

    Args:
        job: the job that was sent.
        answer: as `memcalc.measuring.run_process` returns it.
        command: the command in the record.
    """
    unwritten: list[Any] | None = answer.get("events")
    events = read_events(job.events) if unwritten is None else (event_from(list(values)) for values in unwritten)
    return Measurement(
        spec=job.spec,
        steps=job.steps,
        device=MeasuredDevice(**answer["device"]),
        versions=answer["versions"],
        allocator=answer["allocator"],
        command=command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        phases=tuple(map(phase_from, answer["phases"])),
        parameters=answer["parameters"],
        trainable=answer["trainable"],
        buffers=answer["buffers"],
        outcome=answer["outcome"],
        message=answer["message"],
        seconds=answer.get("seconds", {}),
        events=tuple(events),
    )


def refuse_death(measurement: Measurement, record: str | Path | None) -> None:
    """Reject a run that ran out of memory.

    Raises:
        RanOut: the run ran out of memory.
    """
    if measurement.outcome != OUT_OF_MEMORY:
        return
    message = (measurement.message or "").partition("\n")[0].partition(ADVICE)[0]
    kept = "" if record is None else f" The record up to that point is in {record}."
    text = f"{measurement.spec.name} ran out of memory in {measurement.phases[-1].name}: {message}{kept}"
    raise MeasurementOutOfMemory(text, measurement)


def typed() -> str:
    """Return the command of this process with secrets masked: records are shared."""
    return shlex.join(masked([Path(sys.argv[0]).name, *sys.argv[1:]]))
