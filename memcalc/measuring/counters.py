"""The device's own counters by phase, independent of the recorded allocations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from memcalc.events.event import Event, EventType
from memcalc.events.timeline import timeline
from memcalc.measuring.cpu_profile import MARK, CpuProfile, levels
from memcalc.measuring.measurement import MeasuredPhase


class PhaseCounters:
    """Phases in the order of their first run, including one that failed."""

    def __init__(self) -> None:
        self._phases: dict[str, MeasuredPhase] = {}

    def add(self, phase: MeasuredPhase) -> None:
        """Add a phase. Of the micro-batches of one step the peak and the end of the last one are kept."""
        before = self._phases.get(phase.name)
        if before is not None:
            phase = replace(
                phase,
                peak_allocated_bytes=max(before.peak_allocated_bytes, phase.peak_allocated_bytes),
                inside=max(before, phase, key=lambda each: each.peak_allocated_bytes).inside,
                peak_reserved_bytes=_higher(before.peak_reserved_bytes, phase.peak_reserved_bytes),
                peak_requested_bytes=_higher(before.peak_requested_bytes, phase.peak_requested_bytes),
            )
        self._phases[phase.name] = phase

    @property
    def phases(self) -> tuple[MeasuredPhase, ...]:
        """All phases so far."""
        return tuple(self._phases.values())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context of the whole run; does nothing if something counts anyway."""
        yield


def _higher(before: int | None, now: int | None) -> int | None:
    return None if now is None else max(before or 0, now)


class CudaCounters(PhaseCounters):
    """Reads the caching allocator's counters at phase boundaries. They are in host memory: nothing is synchronized.

    Args:
        device: a CUDA device.
        in_use: returns the bytes of it that this run uses now.
    """

    def __init__(self, device: torch.device, in_use: Callable[[], int]) -> None:
        super().__init__()
        self.device = device
        self._in_use = in_use

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `memcalc.step.loop.Observer`."""
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
        finally:
            self.add(
                MeasuredPhase(
                    name=name,
                    peak_allocated_bytes=torch.cuda.max_memory_allocated(self.device),
                    end_allocated_bytes=torch.cuda.memory_allocated(self.device),
                    reserved_bytes=torch.cuda.memory_reserved(self.device),
                    peak_reserved_bytes=torch.cuda.max_memory_reserved(self.device),
                    peak_requested_bytes=torch.cuda.memory_stats(self.device).get("requested_bytes.all.peak"),
                    device_bytes=self._in_use(),
                )
            )


class CpuCounters(PhaseCounters):
    """Profiles the whole run; allocated bytes are relative to the time before the model was built."""

    def __init__(self) -> None:
        super().__init__()
        self.profiled: CpuProfile | None = None  # set when the run is over
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context of the whole run; the phases are known on exit."""
        try:
            with self._profiler:
                yield
        finally:
            self._read()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `memcalc.step.loop.Observer`."""
        with record_function(MARK + name):
            yield

    def _read(self) -> None:
        """Assign the allocator's records to the phases' spans."""
        found = self.profiled = CpuProfile(self._profiler)
        for level in levels(found.lives, found.spans):
            self.add(MeasuredPhase(level.phase, level.peak, level.end, inside=level.inside))


class RecorderCounters(PhaseCounters):
    """Counters for a rank on the CPU, taken from the recorder, which sees every storage end.

    The profiler's allocator records are incomplete there, because collectives free memory in their own threads.
    """

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:  # noqa: ARG002 -- nothing to record
        """See `memcalc.step.loop.Observer`."""
        yield

    def hear(self, events: Sequence[Event]) -> None:
        """Set the phases from the recorded events."""
        line = timeline(events)
        marks = [(at, event.phase) for at, event in enumerate(line.events) if event.kind is EventType.PHASE]
        ends = [at for at, _ in marks[1:]] + [len(line.events)]
        for (begin, name), end in zip(marks, ends, strict=True):
            totals = line.totals[begin:end]
            self.add(MeasuredPhase(name, max(totals), totals[-1]))
