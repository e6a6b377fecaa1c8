"""Allocations of an uninstrumented run on a CUDA device, attributed with a second, instrumented run.

A dispatch mode changes what it records: while one is active, PyTorch avoids some in-place operations. The recorder
runs those that it knows in place (`in_place`), and no step is known in which instrumentation changes the allocations.
A measurement should not depend on that, however. The allocator's history changes nothing. Therefore the step runs
twice: with the history alone for the bytes, and instrumented for their attribution.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from memcalc.events.event import Event, EventType
from memcalc.ledger.component import Component
from memcalc.recorder.history import ENTRIES

# Most consecutive allocations of the instrumented run that the other run lacks: copies instead of in-place operations
# come singly, or a few at a time in a recomputed layer.
FARTHEST = 64
ALIKE = 4  # allocations that are compared to identify one among several of equal size

Run = tuple[str, int]  # phase, and how many times it has run


class UnobservedHistory:
    """An observer that makes the allocator record its history, with the phases.

    Args:
        device: a CUDA device, real or null.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._phases: list[str] = []
        torch.cuda.memory._record_memory_history("all", None, "python", ENTRIES)  # noqa: SLF001 -- no public name

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `memcalc.step.loop.Observer`."""
        self._phases.append(name)
        torch._C._cuda_setMemoryMetadata(str(len(self._phases)))  # noqa: SLF001 -- as above
        yield

    def close(self) -> tuple[Event, ...]:
        """Return the events without attributions, and end the history."""
        torch.cuda.synchronize(self.device)
        snapshot = torch.cuda.memory._snapshot(self.device)  # noqa: SLF001 -- as above
        entries = snapshot["device_traces"][self.device.index or 0]
        torch.cuda.memory._record_memory_history(None)  # noqa: SLF001 -- as above
        return tuple(self._told(entries))

    def _told(self, entries: list[dict[str, Any]]) -> Iterator[Event]:
        numbers: dict[int, int] = {}
        fresh = count()
        told = 0
        start = entries[0]["time_us"] if entries else 0
        for entry in entries:
            now = entry["time_us"] - start
            for name in self._phases[told : int(entry.get("user_metadata") or 0)]:
                yield Event(EventType.PHASE, phase=name, time_us=now)
                told += 1
            phase = self._phases[told - 1] if told else ""
            action, address = entry["action"], entry.get("addr", -1)
            if action == "alloc":
                numbers[address] = next(fresh)
                yield Event(EventType.ALLOC, numbers[address], entry["size"], phase=phase, time_us=now)
            elif action == "free_completed" and address in numbers:
                yield Event(EventType.FREE, numbers.pop(address), time_us=now)
            elif action == "oom":
                yield Event(EventType.OOM, bytes=entry["size"], phase=phase, time_us=now)
        for name in self._phases[told:]:
            yield Event(EventType.PHASE, phase=name)


def attributed(events: Sequence[Event], watched: Sequence[Event]) -> tuple[Event, ...]:
    """Return the events of one run, attributed with another run that made at least the same allocations in order.

    Both runs are compared phase by phase, including repetitions of a phase; additional allocations of the instrumented
    run are ignored. An allocation that it lacks is a workspace if it is never freed (a library keeps it from the first
    run), else a temporary.
    """
    lent, sizes = _allocations(watched), _allocations(events)
    taken: dict[Run, int] = defaultdict(int)  # allocations of the phase so far
    position: dict[Run, int] = defaultdict(int)  # in the instrumented run, behind the last match
    freed = {event.storage for event in events if event.kind is EventType.FREE}
    found = []
    for event, run in _by_run(events):
        if event.kind is not EventType.ALLOC:
            found.append(event)
            continue
        coming = [each.bytes for each in sizes[run][taken[run] : taken[run] + ALIKE]]
        taken[run] += 1
        match = _match(coming, lent[run], position[run])
        if match is None:
            component = Component.TEMPORARIES if event.storage in freed else Component.LIBRARY_WORKSPACE
            found.append(event._replace(component=component, shape=(event.bytes,), dtype="uint8"))
            continue
        position[run] = match + 1
        other = lent[run][match]
        found.append(other._replace(storage=event.storage, bytes=event.bytes, time_us=event.time_us))
    return tuple(found)


def _match(coming: Sequence[int], candidates: Sequence[Event], begin: int) -> int | None:
    """Return the index of the candidate for the first size: the one with most following matches, else the nearest."""
    best, length = None, 0
    for at in range(begin, min(begin + FARTHEST, len(candidates))):
        alike = 0
        for size, candidate in zip(coming, candidates[at : at + ALIKE], strict=False):
            if candidate.bytes != size:
                break
            alike += 1
        if alike > length:
            best, length = at, alike
        if length == len(coming):
            break
    return best


def _allocations(events: Sequence[Event]) -> dict[Run, list[Event]]:
    """Return the allocations of each phase, separately for each time that it ran."""
    found: dict[Run, list[Event]] = defaultdict(list)
    for event, run in _by_run(events):
        if event.kind is EventType.ALLOC:
            found[run].append(event)
    return found


def _by_run(events: Sequence[Event]) -> Iterator[tuple[Event, Run]]:
    """Yield each event with its phase and how many times the phase has run; it runs once per micro-batch."""
    times: dict[str, int] = defaultdict(int)
    run = ("", 0)
    for event in events:
        if event.kind is EventType.PHASE:
            times[event.phase] += 1
            run = (event.phase, times[event.phase])
        yield event, run
