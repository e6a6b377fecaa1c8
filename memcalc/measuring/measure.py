"""The verb `measure`: run the training step on a real device and keep what it held."""

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
from memcalc.measuring.measurement import OUT_OF_MEMORY, Device, Measurement, phase_from
from memcalc.measuring.records import RECORDS
from memcalc.spec.spec import Spec
from memcalc.step.packages import require
from memcalc.text import masked

ADVICE = " If reserved but unallocated"  # how PyTorch goes on after the figures, in general terms


class RanOut(OutOfMemory):
    """A measured run that ended out of memory, with what was measured until then."""

    def __init__(self, text: str, measurement: Measurement) -> None:
        super().__init__(text)
        self.measurement = measurement


class NotKept(Unavailable):
    """A measured run whose record could not be written, with all that was measured."""

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
    """What a device really holds, phase by phase, while it runs `steps` training steps in a process of its own.

    Args:
        spec: what to train.
        device: "cuda", "cuda:1" or "cpu"; None: the GPU.
        steps: optimizer steps. The first one makes the optimizer's states; the second is already the steady state.
        record: a file that the figures are appended to, out of memory or not.
        command: what to note as the command; None: that of this process.
        worker: the process to ask; None: one of this Python.
        alloc_conf: PYTORCH_CUDA_ALLOC_CONF of the run; "": as in the environment.
        force: run on a device that is busy, or too small for the weights alone.
        weight_bytes: what is needed before the first step, as estimated; 0: not known.

    Raises:
        Unavailable: torch, transformers or a GPU is missing, or the GPU is busy.
        InputError: the step cannot run what the spec asks for, or the device has no kernel for it.
        RanOut: the device had too little. The record up to that point has been kept.
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
    keep(measurement, record)
    return measurement


def keep(measurement: Measurement, record: str | Path | None) -> None:
    """Append a measurement to a file of records, if there is one, and refuse a run that ended out of memory.

    Raises:
        NotKept: the record could not be written.
        RanOut: the run ended out of memory.
    """
    unkept = None if record is None else unwritten((measurement.to_record(),), record)
    try:
        refuse_death(measurement, None if unkept else record)
    except RanOut as error:
        if unkept is None:
            raise
        raise NotKept(f"{error}\n{unkept}", measurement) from None
    if unkept is not None:
        raise NotKept(str(unkept), measurement)


def unwritten(records: Iterable[dict[str, Any]], file: str | Path) -> NotWritten | None:
    """Append records to a file; what went wrong is returned, since the result is still to be shown."""
    try:
        RECORDS.append(records, Path(file))
    except NotWritten as error:
        return error
    return None


def measured(job: Job, answer: dict[str, Any], command: str) -> Measurement:
    """A measurement of what a process answered, with the events that it left in the job's file.

    Args:
        job: what it was asked.
        answer: of `memcalc.measuring.child`.
        command: to note as the command.
    """
    unwritten: list[Any] | None = answer.get("events")
    events = read_events(job.events) if unwritten is None else (event_from(list(values)) for values in unwritten)
    return Measurement(
        spec=job.spec,
        steps=job.steps,
        device=Device(**answer["device"]),
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
    """A run that ended out of memory is no answer.

    Raises:
        RanOut: it did.
    """
    if measurement.outcome != OUT_OF_MEMORY:
        return
    message = (measurement.message or "").partition("\n")[0].partition(ADVICE)[0]
    kept = "" if record is None else f" The record up to that point is in {record}."
    text = f"{measurement.spec.name} ran out of memory in {measurement.phases[-1].name}: {message}{kept}"
    raise RanOut(text, measurement)


def typed() -> str:
    """The command of this process, without secrets: records are shared."""
    return shlex.join(masked([Path(sys.argv[0]).name, *sys.argv[1:]]))
