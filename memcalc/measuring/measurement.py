"""Figures of a measured run: the device's counters by phase, every allocation, the device and the software."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from memcalc.events.event import Event
from memcalc.ledger.result import Result
from memcalc.recorder.run_analysis import RunAnalysis
from memcalc.spec.spec import Spec

DONE, OUT_OF_MEMORY = "done", "out of memory"


@dataclass(frozen=True, slots=True)
class MeasuredPhase:
    """One phase; of several micro-batches, that with the highest peak. Bytes; None: the device has no such figure."""

    name: str  # as in memcalc/ledger/row_drafts.py
    peak_allocated_bytes: int  # peak of allocated bytes
    end_allocated_bytes: int  # bytes allocated when the phase ended
    reserved_bytes: int | None = None  # bytes reserved by the caching allocator at the end
    peak_reserved_bytes: int | None = None  # peak of reserved bytes
    peak_requested_bytes: int | None = None  # peak of requested bytes, before the allocator's rounding
    # bytes in use on the device at the end, minus those that others used before the run
    device_bytes: int | None = None
    # on a CPU, bytes at the peak that operators allocate and free internally, by operator; no trace sees them
    inside: dict[str, int] | None = None


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """The device of a measurement."""

    kind: str  # "cpu", "cuda", or "null cuda": PyTorch's CUDA build on accounting-only stub libraries
    identifier: str  # "cpu", "cuda:0" or "null:<gpu>"
    name: str  # name that the driver reports
    total_bytes: int | None = None  # for a GPU, memory that PyTorch can allocate from
    driver: str | None = None  # for a GPU, CUDA version of the driver
    release: str | None = None  # for a GPU, version of the driver: "570.86.15"
    others_bytes: int | None = None  # bytes that all processes used before the run; None if nothing reports them
    context_bytes: int | None = None  # bytes of the CUDA context before any allocation; None on a CPU
    source: str | None = None  # source of device_bytes: "nvml", "driver" (cudaMemGetInfo), or None on a CPU


@dataclass(frozen=True)
class Measurement:
    """A measured run."""

    spec: Spec  # the run
    steps: int  # requested optimizer steps
    device: MeasuredDevice  # the device
    versions: dict[str, str]  # versions of Python, torch, CUDA, its libraries and transformers
    allocator: str  # settings of the caching allocator in the environment; "" if there are none
    command: str  # the command as typed
    date: str  # UTC, ISO 8601
    phases: tuple[MeasuredPhase, ...]  # the phases in the order of the run
    parameters: int  # elements of all nn.Parameters, tied weights counted once
    trainable: int  # elements of the trained nn.Parameters
    buffers: int  # elements of all buffers
    outcome: str = DONE  # "done" or "out of memory"
    message: str | None = None  # PyTorch's error message if the run ran out of memory
    rank: int = 0  # index of this rank; 0 on one rank
    ranks: int = 1  # number of ranks
    events: tuple[Event, ...] = field(default=(), repr=False)  # every allocation and free, attributed
    # host time by part: "device" (its context), "build", "steps", "again" (the instrumented run), "all"
    seconds: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def peak(self) -> MeasuredPhase:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.peak_allocated_bytes)

    @cached_property
    def analysis(self) -> RunAnalysis:
        """The events summed and replayed: the input of plots and tables of a run."""
        from memcalc.measuring.result import analyze

        return analyze(self)

    @cached_property
    def result(self) -> Result:
        """The figures as the result type of all commands."""
        from memcalc.measuring.result import to_result

        return to_result(self)

    def to_record(self) -> dict[str, Any]:
        """Return the figures as a record: everything but the events."""
        from memcalc.measuring.records import to_record

        return to_record(self)


def phase_from(values: dict[str, Any]) -> MeasuredPhase:
    """Return a phase from its values in a record."""
    names = MeasuredPhase.__dataclass_fields__
    return MeasuredPhase(**{name: value for name, value in values.items() if name in names})
