"""A recording as a stream of events, which any allocator can replay."""

from __future__ import annotations

from memcalc.events.event import Event, Kind
from memcalc.ledger.component import Component
from memcalc.snapshots.beginning import Beginning, beginning
from memcalc.snapshots.composition import components
from memcalc.snapshots.frames import place, was_asked_for
from memcalc.snapshots.recording import Recording, Snapshot

OPTIMIZER_STEP = "Optimizer.step"  # how torch.profiler's annotations of optimizers begin


def events_of(snapshot: Snapshot, recording: Recording, start: Beginning | None = None) -> list[Event]:
    """The events of one device: what it held at the beginning, then its history.

    Steps are told by PyTorch's annotations of optimizers, where there are any. A flush that running out of memory
    forced is left out: another allocator may need none.
    """
    return _Stream(snapshot, recording, start or beginning(recording)).events()


class _Stream:
    """Events, as the history is gone through."""

    def __init__(self, snapshot: Snapshot, recording: Recording, start: Beginning) -> None:
        self._snapshot = snapshot
        self._recording = recording
        self._start = start
        self._lines = [place(stack) for stack in snapshot.stacks]
        self._kinds = components(snapshot, recording)
        handles = {entry.stream for entry in recording.entries} | {held.stream for held in start.held.values()} | {0}
        self._streams = {handle: number for number, handle in enumerate(sorted(handles))}  # 0 is the default one
        marks = [annotation for annotation in recording.annotations if annotation.name.startswith(OPTIMIZER_STEP)]
        self._marks = marks[::-1]
        self._steps = 0
        self._storages: dict[int, int] = {}  # by address
        self._freed = -1  # the storage of a free that was the event before
        self._given_back: set[int] = set()  # freed, whether other streams still use it or not
        self._flushed = False
        self._events: list[Event] = []

    def events(self) -> list[Event]:
        """All of them."""
        if self._marks:
            self._events.append(Event(Kind.PHASE, phase="step_1"))
        for number, held in enumerate(sorted(self._start.held.values(), key=lambda held: held.address)):
            self._alloc(-2 - number, held.address, held.requested, held.stream, None, held.stack, 0)
            if held.is_waiting:  # freed before the history begins
                self._given_back.add(-2 - number)
                self._events.append(Event(Kind.FREE, -2 - number))
        entries = self._recording.entries
        first = entries[0].time_us if entries else 0
        for index, (action, address, size, stream, time, stack, _) in enumerate(entries):
            if self._marks and self._marks[-1].time_us <= time:
                self._phases(time)
            if action == "alloc":
                self._flush()
                self._alloc(index, address, size, stream, self._kinds[index], stack, max(0, time - first))
            elif action == "free_requested":
                self._flush()
                self._free(address)
            elif action == "free_completed":
                self._complete(address)
            elif action == "oom":
                self._events.append(Event(Kind.OOM, bytes=size, stream=self._streams[stream]))
            elif action in ("segment_free", "segment_unmap"):
                self._flushed = self._flushed or was_asked_for(self._snapshot, stack)
        self._flush()
        return self._events

    def _phases(self, time: int) -> None:
        """The marks up to a moment."""
        while self._marks and self._marks[-1].time_us <= time:
            if self._marks.pop().stage == "START":
                self._steps += 1
                self._events.append(Event(Kind.PHASE, phase=f"optimizer_step_{self._steps}"))
            elif self._steps:
                self._events.append(Event(Kind.PHASE, phase=f"step_{self._steps + 1}"))

    def _alloc(
        self, storage: int, address: int, size: int, stream: int, kind: Component | None, stack: int, time: int
    ) -> None:
        self._storages[address] = storage
        self._freed = -1
        line, number = self._lines[stack], self._streams[stream]
        self._events.append(Event(Kind.ALLOC, storage, size, number, component=kind, line=line, time_us=time))

    def _free(self, address: int) -> None:
        storage = self._storages.get(address)
        if storage is not None and storage not in self._given_back:
            self._freed = storage
            self._given_back.add(storage)
            self._events.append(Event(Kind.FREE, storage))

    def _complete(self, address: int) -> None:
        """Told only where it is not at once."""
        storage = self._storages.pop(address, None)
        if storage is not None and storage != self._freed:
            self._events.append(Event(Kind.FREE_COMPLETED, storage))
        self._freed = -1

    def _flush(self) -> None:
        if self._flushed:
            self._events.append(Event(Kind.EMPTY_CACHE))
            self._flushed = False
