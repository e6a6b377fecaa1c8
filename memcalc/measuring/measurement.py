"""What a measured run gives: the device's own figures by phase, every allocation, and who measured them on what."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from memcalc.events.event import Event
from memcalc.ledger.result import Result
from memcalc.recorder.judged import Judged
from memcalc.spec.spec import Spec

DONE, OUT_OF_MEMORY = "done", "out of memory"


@dataclass(frozen=True, slots=True)
class MeasuredPhase:
    """One phase. Of several micro-batches the one with the highest peak. Bytes; None where a device has no such figure.

    Args:
        name: as in memcalc/ledger/phases.py.
        peak_allocated_bytes: most that was allocated at once.
        end_allocated_bytes: still allocated when the phase ended.
        reserved_bytes: held by the caching allocator at the end.
        peak_reserved_bytes: most that it held.
        peak_requested_bytes: most that the program had asked for at once, before the allocator's rounding.
        device_bytes: in use on the device at the end, but for what others used before the run.
        inside: on a CPU, what of the peak operators kept to themselves, by operator; of these a trace knows nothing.
    """

    name: str
    peak_allocated_bytes: int
    end_allocated_bytes: int
    reserved_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_requested_bytes: int | None = None
    device_bytes: int | None = None
    inside: dict[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """The device that was measured.

    Args:
        kind: "cpu", "cuda", or "null cuda": PyTorch's CUDA build on accounting-only stub libraries.
        identifier: "cpu", "cuda:0" or "null:<card>".
        name: as the driver gives it.
        total_bytes: of its memory, for a GPU: what PyTorch can allocate from.
        driver: CUDA version of the driver, for a GPU.
        release: of the driver, for a GPU: "570.86.15".
        others_bytes: in use before the run began, by whomever; None where nobody could be asked.
        context_bytes: what the CUDA context took before anything was allocated; None on a CPU.
        source: who tells what is in use on the device: "nvml", "driver" (cudaMemGetInfo), or None on a CPU.
    """

    kind: str
    identifier: str
    name: str
    total_bytes: int | None = None
    driver: str | None = None
    release: str | None = None
    others_bytes: int | None = None
    context_bytes: int | None = None
    source: str | None = None


@dataclass(frozen=True)
class Measurement:
    """A measured run.

    Args:
        spec: what ran.
        steps: optimizer steps that it was to run.
        device: where.
        versions: of Python, torch, CUDA, its libraries and transformers.
        allocator: settings of the caching allocator from the environment; "" when there are none.
        command: what was typed.
        date: UTC, ISO 8601.
        phases: in the order of the run.
        parameters: elements of all nn.Parameters, tied ones once.
        trainable: those of them that are trained.
        buffers: elements of all buffers.
        outcome: "done" or "out of memory".
        message: PyTorch's, if it ran out of memory.
        rank: of several ranks, which one; 0 of one.
        ranks: how many there were.
        events: every allocation and release, attributed.
        seconds: how long the host took, by part: "device" (its context), "build", "steps", "again" (watched), "all".
    """

    spec: Spec
    steps: int
    device: Device
    versions: dict[str, str]
    allocator: str
    command: str
    date: str
    phases: tuple[MeasuredPhase, ...]
    parameters: int
    trainable: int
    buffers: int
    outcome: str = DONE
    message: str | None = None
    rank: int = 0
    ranks: int = 1
    events: tuple[Event, ...] = field(default=(), repr=False)
    seconds: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def peak(self) -> MeasuredPhase:
        """The phase that needed most."""
        return max(self.phases, key=lambda phase: phase.peak_allocated_bytes)

    @cached_property
    def judged(self) -> Judged:
        """The events added up and replayed: what pictures and tables of a run are made from."""
        from memcalc.measuring.result import judged

        return judged(self)

    @cached_property
    def result(self) -> Result:
        """The same figures in the shape that all verbs share."""
        from memcalc.measuring.result import to_result

        return to_result(self)

    def to_result(self) -> Result:
        """As `result`."""
        return self.result

    def to_record(self) -> dict[str, Any]:
        """The same figures as they are kept in a file of records: all but the events."""
        from memcalc.measuring.records import to_record

        return to_record(self)


def phase_from(values: dict[str, Any]) -> MeasuredPhase:
    """A phase of a record."""
    names = MeasuredPhase.__dataclass_fields__
    return MeasuredPhase(**{name: value for name, value in values.items() if name in names})


def as_values(phase: MeasuredPhase) -> dict[str, Any]:
    """A phase for a record."""
    return asdict(phase)
