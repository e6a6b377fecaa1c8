"""Watching a run on the CPU, through the profiler's records of its allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from memcalc.measuring.measurement import Holding, MeasuredPhase
from memcalc.measuring.observing import Log, certain, holdings
from memcalc.step.loop import TrainingRun

MARK = "memcalc phase "


class CpuObserver:
    """Profiles the whole run; what was allocated is relative to the moment before the model."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.log = Log()
        self._held: list[tuple[str, tuple[Holding, ...]]] = []
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Entered around the whole run; the phases are known when it is left."""
        try:
            with self._profiler:
                yield
        finally:
            self._read()

    @property
    def phases(self) -> tuple[MeasuredPhase, ...]:
        """What was seen, the phase that failed included."""
        return self.log.phases

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `Observer`."""
        start = holdings(self.run)
        try:
            with record_function(MARK + name):
                yield
        finally:
            self._held.append((name, certain(name, start, holdings(self.run))))

    def _read(self) -> None:
        """Lay the allocator's records over the phases' spans."""
        held = iter(self._held)
        level = peak = base = 0
        first = True
        for event in _events(self._profiler):
            if event.change is not None:
                level += event.change
                peak = max(peak, level)
            elif event.begins:
                peak = level
                base, first = (level, False) if first else (base, False)
            else:
                name, tensors = next(held)
                self.log.add(MeasuredPhase(name, peak - base, level - base, None, None, None, tensors))


class _Event(NamedTuple):
    """A phase's border, or bytes allocated (negative: freed)."""

    time_ns: int
    begins: bool = False
    change: int | None = None


def _events(profiler: profile) -> list[_Event]:
    found: list[_Event] = []
    results: Any = profiler.profiler.kineto_results if profiler.profiler is not None else None
    for event in results.events():
        if event.name() == "[memory]":
            found.append(_Event(event.start_ns(), change=event.nbytes()))
        elif event.name().startswith(MARK):
            found.append(_Event(event.start_ns(), begins=True))
            found.append(_Event(event.end_ns()))
    return sorted(found, key=lambda event: event.time_ns)
